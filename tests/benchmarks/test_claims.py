"""What the documentation claims is what results say, and a claim that does not hold is told."""

import dataclasses
import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.claims import claims as book
from benchmarks.claims import measure_all, numbers, plots, reproduce
from benchmarks.support import machine
from zapex.errors import ConfigError

SEEN = {
    "results": {
        "slow": {"p10": 9.0, "p50": 10.0, "p90": 12.0, "n": 5},
        "fast": {"p10": 1.9, "p50": 2.0, "p90": 2.5, "n": 5},
        "runs": [{"kind": "a, b", "s": 1.0}, {"kind": "c", "s": 3.0}, {"kind": "c", "s": 5.0}],
    }
}


def write_claims(folder: Path, claims: list[dict[str, object]], script: str = "") -> Path:
    """A claims file whose one measurement writes SEEN, or does as `script` says."""
    program = folder / "measure.py"
    program.write_text(
        script or f"import sys\nopen(sys.argv[1], 'w').write({json.dumps(SEEN)!r})\n"
    )
    command = f"{sys.executable} {program} {{json}}"
    lines = [f'[measurement.one]\ncommand = "{command}"\nminutes = 1\nmemory_gib = 0.01\n']
    for claim in claims:
        fields = {"sentence": "a figure", "measurement": "one", "better": "less", **claim}
        lines.append("[[claim]]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    path = folder / "claims.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(tmp_path: Path, claims: list[dict[str, object]], *more: str, script: str = "") -> int:
    path = write_claims(tmp_path, claims, script)
    return reproduce.main(["--claims", str(path), "--work", str(tmp_path / "work"), *more])


def table(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The table's rows by id."""
    said = capsys.readouterr().out
    rows = said[said.index("claimed: p10") :].splitlines()
    return {row.split()[0]: row for row in rows if row.startswith("id-")}


def test_a_figure_in_the_published_spread_or_better_is_reproduced_and_others_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = "results.slow.p50"
    code = run(tmp_path, [
        {"id": "id-inside", "at": at, "published": [8, 9, 11]},
        {"id": "id-a-tenth-above", "at": at, "published": [8, 9, 9.1]},
        {"id": "id-far-above", "at": at, "published": [8, 9, 9.0]},
        {"id": "id-better", "at": at, "published": [20, 22, 24]},
        {"id": "id-more-is-better", "at": at, "published": [1, 2, 3], "better": "more"},
        {"id": "id-too-few", "at": at, "published": [12, 13, 14], "better": "more"},
        {"id": "id-neither-way", "at": at, "published": [20, 22, 24], "better": "same"},
    ])  # fmt: skip
    rows = table(capsys)
    wrong = {name for name, row in rows.items() if row.rstrip().endswith(" not")}
    assert wrong == {"id-far-above", "id-too-few", "id-neither-way"}
    assert {name for name, row in rows.items() if row.endswith("reproduced")} == set(rows) - wrong
    assert code == 1


def test_what_cannot_be_had_here_is_told_with_its_reason_and_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(book.NEEDS, "gpu", lambda: "no NVIDIA GPU")
    at = "results.slow.p50"
    claims = [
        {"id": "id-gpu", "at": at, "published": [1, 1, 1], "needs": ["gpu"]},
        {"id": "id-any", "at": at, "published": [10, 10, 10], "needs": ["any"]},
    ]
    assert run(tmp_path, claims) == 0
    rows = table(capsys)
    assert rows["id-gpu"].endswith("not possible here: no NVIDIA GPU")
    assert rows["id-any"].endswith("reproduced")


def test_a_figure_of_a_machine_that_became_crowded_refutes_nothing_that_needs_a_quiet_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(book.NEEDS, "quiet", lambda: "")
    crowded = {**SEEN, "during": {"foreign_cpu": 0.4, "steal": 0.0}}
    script = f"import sys\nopen(sys.argv[1], 'w').write({json.dumps(crowded)!r})\n"
    claims = [
        {"id": "id-quiet", "at": "results.slow.p50", "published": [1, 1, 1], "needs": ["quiet"]},
        {"id": "id-quiet-yet", "at": "results.slow.p50", "published": [10, 10, 10],
         "needs": ["quiet"]},
        {"id": "id-any", "at": "results.slow.p50", "published": [1, 1, 1]},
    ]  # fmt: skip
    assert run(tmp_path, claims, script=script) == 1
    rows = table(capsys)
    assert rows["id-quiet"].endswith("meanwhile other processes take 40% of the processor")
    assert rows["id-quiet-yet"].endswith("reproduced")
    assert rows["id-any"].rstrip().endswith(" not")


def test_another_kind_of_processor_refutes_nothing_that_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(kib: int) -> str:
        facts = {"cpu": "AMD EPYC", "cores": 2, "cache_bytes": {"L1": kib << 10, "L2": 512 << 10}}
        return json.dumps({**SEEN, "machine": facts})

    monkeypatch.setitem(book.NEEDS, "quiet", lambda: "")
    (tmp_path / "one.json").write_text(on(48))
    far, near = ({"at": "results.slow.p50", "published": [x, x, x]} for x in (1, 10))
    claims: list[dict[str, object]] = [
        {"id": "id-timed", **far, "needs": ["quiet"]},
        {"id": "id-timed-alike", **near, "needs": ["quiet"]},
        {"id": "id-counted", **far},
    ]

    def rows(kib: int) -> dict[str, str]:
        script = f"import sys\nopen(sys.argv[1], 'w').write({on(kib)!r})\n"
        assert run(tmp_path, claims, "--results", str(tmp_path), script=script) == 1
        return table(capsys)

    elsewhere = rows(32)
    assert elsewhere["id-timed"].endswith(
        "not possible here: published: 2 cores of AMD EPYC, caches of 48 KiB and 512 KiB; "
        "here: 2 cores of AMD EPYC, caches of 32 KiB and 512 KiB"
    )
    assert elsewhere["id-timed-alike"].endswith("reproduced")
    assert elsewhere["id-counted"].rstrip().endswith(" not")
    assert rows(48)["id-timed"].rstrip().endswith(" not")


def test_a_command_that_fails_or_writes_nothing_reproduces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim: dict[str, object] = {"id": "id-one", "at": "results.slow.p50", "published": [9, 10, 11]}
    assert run(tmp_path, [claim], script="raise SystemExit('no such luck')\n") == 1
    row = table(capsys)["id-one"]
    assert "not: the command failed: exit code 1" in row
    assert row.endswith("no such luck")
    assert run(tmp_path, [claim], script="pass\n") == 1
    assert "it wrote no one.json" in table(capsys)["id-one"]
    assert run(tmp_path, [{**claim, "at": "results.gone.p50"}]) == 1
    assert "no such figure" in table(capsys)["id-one"]


def test_a_figure_of_an_earlier_run_is_never_taken_for_that_of_a_command_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim: dict[str, object] = {"id": "id-one", "at": "results.slow.p50", "published": [9, 10, 11]}
    assert run(tmp_path, [claim]) == 0
    assert run(tmp_path, [claim], script="pass\n") == 1


def test_quick_measures_only_what_fits_into_ten_minutes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim: dict[str, object] = {"id": "id-one", "at": "results.slow.p50", "published": [9, 10, 11]}
    path = write_claims(tmp_path, [claim])
    path.write_text(path.read_text().replace("minutes = 1", "minutes = 11"))
    work = ["--work", str(tmp_path / "work")]
    assert reproduce.main(["--claims", str(path), "--quick", *work]) == 0
    assert "takes 11 min" in table(capsys)["id-one"]


def test_a_claim_that_is_not_there_and_fields_that_make_no_sense_are_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim: dict[str, object] = {"id": "id-one", "at": "results.slow.p50", "published": [9, 10, 11]}
    assert run(tmp_path, [claim], "--claim", "id-two") == 2
    assert "no claim 'id-two'" in capsys.readouterr().err
    for wrong in ({"better": "nicer"}, {"published": [1, 2]}, {"needs": ["luck"]}, {"colour": 1}):
        assert run(tmp_path, [{**claim, **wrong}]) == 2
    assert run(tmp_path, [claim, claim]) == 2


def test_only_claims_about_redis_need_it() -> None:
    for claim in book.load()[0]:
        paths = " ".join((*claim.at, *claim.over))
        about = any(mark in paths for mark in ("redis", "[system=a,", "[system=a2,"))
        assert ("redis" in claim.needs) == about, claim.id


def test_paths_lead_to_rows_of_lists_to_ratios_and_to_medians_with_their_spread(
    tmp_path: Path,
) -> None:
    rows = "results.runs[kind=c].s"
    path = write_claims(tmp_path, [
        {"id": "one", "at": "results.runs[kind=a, b,s=1.0].s", "published": [0, 0, 0]},
        {"id": "median", "at": rows, "published": [0, 0, 0]},
        {"id": "ratio", "at": "results.slow.p50", "over": "results.fast.p50",
         "published": [0, 0, 0]},
        {"id": "least", "at": ["results.gone.p50", "results.slow.p50", "results.fast.p50"],
         "published": [0, 0, 0], "scale": 10},
        {"id": "most", "at": ["results.slow.p50", "results.fast.p50"], "of": "most",
         "published": [0, 0, 0]},
        {"id": "most-rows", "at": rows, "of": "most", "published": [0, 0, 0]},
        {"id": "place", "at": "results.runs.2.s", "published": [0, 0, 0]},
    ])  # fmt: skip
    seen = {claim.id: claim.seen(SEEN) for claim in book.load(path)[0]}
    assert seen["one"] == (1.0, 1.0, 1.0)
    assert seen["median"] == pytest.approx((3.2, 4.0, 4.8))
    assert seen["ratio"] == (4.5, 5.0, 6.0)
    assert seen["least"] == (19.0, 20.0, 25.0)
    assert seen["most"][1] == 10.0
    assert seen["most-rows"] == (5.0, 5.0, 5.0)
    assert seen["place"][1] == 5.0


def test_a_result_that_is_a_list_of_points_has_the_figures_and_doubts_of_each(
    tmp_path: Path,
) -> None:
    claim = {"id": "one", "at": "[system=a,actors=8].share", "published": [0, 0, 0]}
    one = book.load(write_claims(tmp_path, [claim]))[0][0]
    rows = [
        {"system": "a", "actors": n, "share": n / 8, "modelled": False,
         "machine": {"doubts": [] if n == 1 else ["dirty"]}}
        for n in (1, 8)
    ]  # fmt: skip
    assert one.seen(rows)[1] == 1.0
    assert book.doubts_of(rows, one.measurement) == ["dirty"]
    rows.append({**rows[1], "actors": 2, "modelled": True, "machine": {}})
    assert book.doubts_of(rows, one.measurement) == ["dirty"]


@pytest.fixture
def needs_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A claims file whose measurement needs a quiet machine."""
    monkeypatch.setattr(book, "_PAUSE_S", 0.0)
    path = write_claims(
        tmp_path, [{"id": "id-one", "at": "results.slow.p50", "published": [9, 10, 11]}]
    )
    path.write_text(path.read_text().replace("minutes = 1", 'minutes = 1\nneeds = ["quiet"]'))
    return path


def test_a_machine_that_becomes_quiet_between_two_looks_is_not_given_up(
    needs_quiet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(["busy"] * 3)
    monkeypatch.setitem(book.NEEDS, "quiet", lambda: next(found, ""))
    assert reproduce.main(["--claims", str(needs_quiet), "--work", str(tmp_path / "work")]) == 0
    assert (tmp_path / "work/one.json").exists()
    found = iter(["busy"] * 3)
    one = book.load(needs_quiet)[0][0].measurement
    assert measure_all.measure(one, tmp_path, time.monotonic() + 60).startswith("doubtful")


def test_a_machine_that_stays_busy_is_given_up_when_time_is_over_and_one_without_a_gpu_at_once(
    needs_quiet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(book.NEEDS, "quiet", lambda: "busy")
    monkeypatch.setitem(book.NEEDS, "gpu", lambda: "no NVIDIA GPU")
    one = book.load(needs_quiet)[0][0].measurement
    assert book.wait_until_possible(one, time.monotonic()) == "busy"
    both = dataclasses.replace(one, needs=("quiet", "gpu"))
    assert book.wait_until_possible(both, time.monotonic() + 60) == "no NVIDIA GPU"


def test_a_busy_machine_is_no_doubt_about_what_only_counts() -> None:
    during = {"commit": "abc-dirty", "foreign_cpu": 0.5, "steal": 0.5}
    report = {"doubts": machine.doubts({"commit": "abc-dirty"}, during, None)}
    timed = book.Measurement("one", "true", "one.json", 1, 1)
    counted = dataclasses.replace(timed, counts=True)
    assert len(book.doubts_of(report, timed)) == 3
    assert book.doubts_of(report, counted) == ["uncommitted changes (abc-dirty)"]
    assert book.doubts_of({}, counted) == ["it does not say what else the machine did"]


def test_every_number_of_the_texts_is_that_of_its_claim_and_of_the_newest_result() -> None:
    """Mend it with `make numbers`."""
    claims, _ = book.load()
    assert numbers.published(book.CLAIMS.read_text(), claims) == book.CLAIMS.read_text()
    by_id = {claim.id: claim for claim in claims}
    used = set()
    for path in numbers.TEXTS:
        text = path.read_text()
        used |= {match[2] for match in numbers.MARKED.finditer(text)}
        assert numbers.numbered(text, by_id) == text, path
    assert used == set(by_id), "a claim without a number in a text, or the other way round"


def test_a_number_that_differs_from_its_claim_is_written_anew(tmp_path: Path) -> None:
    path = write_claims(
        tmp_path,
        [{"id": "a-b", "at": "results.slow.p50", "published": [1, 2, 3], "format": ".1f"}],
    )
    claims, _ = book.load(path)
    (tmp_path / "one.json").write_text(json.dumps(SEEN))
    path.write_text(numbers.published(path.read_text(), claims, tmp_path))
    claims, _ = book.load(path)
    assert claims[0].published == (9, 10, 12)
    text = "It took 7<!--a-b--> s (8<!--a-b:p10--> to 1,000<!--a-b:p90--> s), in 5 runs."
    assert numbers.numbered(text, {"a-b": claims[0]}) == (
        "It took 10.0<!--a-b--> s (9.0<!--a-b:p10--> to 12.0<!--a-b:p90--> s), in 5 runs."
    )
    with pytest.raises(KeyError):
        numbers.numbered("5<!--unknown-->", {"a-b": claims[0]})


EVIDENCE = {"machine": {}, "during": {"foreign_cpu": 0.0, "steal": 0.0}, "doubts": []}


def measurement(tmp_path: Path, script: str, parts: tuple[str, ...] = ()) -> book.Measurement:
    (tmp_path / "m.py").write_text(f"import json, sys\nfrom pathlib import Path\n{script}")
    command = f"{sys.executable} {tmp_path / 'm.py'} {{json}}"
    return book.Measurement("some", command, "some.json", 0.1, 0.01, parts=parts)


def test_a_result_with_doubts_is_measured_again_and_kept_apart(tmp_path: Path) -> None:
    count = tmp_path / "count"
    one = measurement(
        tmp_path,
        f"""
count = Path({str(count)!r})
tries = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (tries + 1))
doubts = ["other processes took 9 % of the processor"] if tries < 1 else []
Path(sys.argv[1]).write_text(json.dumps({{**{EVIDENCE!r}, "doubts": doubts}}))
""",
    )
    work = tmp_path / "work"
    assert measure_all.measure(one, work, 0.0).startswith("measured")
    assert count.read_text() == "xx"
    assert measure_all.lacks(one, work) == ""
    assert (work / "some.doubtful.json").exists()


def test_a_result_that_stays_doubtful_or_says_nothing_of_its_machine_is_none(
    tmp_path: Path,
) -> None:
    silent = measurement(tmp_path, "Path(sys.argv[1]).write_text('{}')")
    work = tmp_path / "work"
    assert measure_all.measure(silent, work, 0.0).startswith("doubtful: it does not say")
    assert not (work / "some.json").exists()
    assert measure_all.publish([silent], work, tmp_path) == []


def test_what_is_published_leaves_the_other_parts_of_its_file(tmp_path: Path) -> None:
    one = measurement(tmp_path, "", parts=("a",))
    (tmp_path / "work").mkdir()
    others = {"b": {"lost": 2}}  # not this measurement's: an older run wrote it
    report = {"benchmark": "plane", "results": {"a": {**EVIDENCE, "lost": 0}, **others}}
    (tmp_path / "work/some.json").write_text(json.dumps(report))
    (tmp_path / "some.json").write_text(json.dumps({"results": {"a": {"lost": 1}, "b": {}}}))
    assert measure_all.lacks(one, tmp_path) == "it does not say what else the machine did"
    assert measure_all.publish([one], tmp_path / "work", tmp_path) == ["some"]
    written = json.loads((tmp_path / "some.json").read_text())["results"]
    assert written == {"a": {**EVIDENCE, "lost": 0}, "b": {}}
    assert measure_all.lacks(one, tmp_path) == ""


def test_a_figure_of_several_runs_is_their_median_between_the_lowest_p10_and_the_highest_p90(
    tmp_path: Path,
) -> None:
    at = "results.slow.p50"
    claims: list[dict[str, object]] = [
        {"id": "slow", "at": at, "published": [0, 0, 0]},
        {"id": "ratio", "at": at, "over": "results.fast.p50", "published": [0, 0, 0]},
        {"id": "rare", "at": "results.rare.p50", "published": [0, 0, 0]},
        {"id": "gone", "at": "results.gone.p50", "published": [0, 0, 0]},
    ]
    by_id = {claim.id: claim for claim in book.load(write_claims(tmp_path, claims))[0]}

    def run(low: float, middle: float, high: float, divisor: float) -> dict[str, object]:
        slow = {"p10": low, "p50": middle, "p90": high}
        return {"results": {"slow": slow, "fast": {"p50": divisor}}}

    report = {**run(9, 10, 12, 5), "again": [run(6, 7, 8, 1), run(10, 11, 14, 1)]}
    report["results"]["rare"] = {"p50": 3.0}  # type: ignore[index]
    assert by_id["slow"].seen(report) == (6, 10, 14)
    assert by_id["ratio"].seen(report) == (1.8, 7, 14)  # 2, 7 and 11: each run by itself
    assert by_id["rare"].seen(report) == (3, 3, 3)
    with pytest.raises(KeyError, match=r"results\.gone\.p50"):
        by_id["gone"].seen(report)


def test_a_run_goes_beside_what_is_published_if_it_is_another_of_the_same_kind_of_machine(
    tmp_path: Path,
) -> None:
    one, work = measurement(tmp_path, ""), tmp_path / "work"
    work.mkdir()

    def result(time: str, kib: int = 32, doubts: tuple[str, ...] = ()) -> str:
        facts = {"time": time, "cpu": "AMD EPYC", "cores": 2, "cache_bytes": {"L1": kib << 10}}
        return json.dumps({**EVIDENCE, "machine": facts, "doubts": doubts})

    def again() -> list[str]:
        measure_all.publish_again([one], work, tmp_path)
        report = json.loads((tmp_path / "some.json").read_text())
        assert list(book.evidence_of(report, one)) == book.runs_of(report)
        return [run["machine"]["time"] for run in book.runs_of(report)]

    (work / "some.json").write_text(result("noon"))
    with pytest.raises(ConfigError, match="no single run"):
        again()
    (tmp_path / "some.json").write_text(result("dawn"))
    assert again() == ["dawn", "noon"]
    with pytest.raises(ConfigError, match="published already"):
        again()
    for wrong, why in ((result("dusk", kib=48), "another kind of machine"),
                       (result("dusk", doubts=("dirty",)), "dirty")):  # fmt: skip
        (work / "some.json").write_text(wrong)
        with pytest.raises(ConfigError, match=why):
            again()
    (work / "some.json").write_text(result("dusk"))
    assert again() == ["dawn", "noon", "dusk"]
    assert measure_all.publish([one], work, tmp_path) == ["some"]
    assert len(book.runs_of(json.loads((tmp_path / "some.json").read_text()))) == 1


def test_each_picture_is_drawn_from_the_result_of_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = [name for name in plots.PLOTS if (book.RESULTS / f"{name}.json").exists()]
    assert {"sumtree", "transport"} <= set(there)
    for name in there:
        (tmp_path / f"{name}.json").write_text((book.RESULTS / f"{name}.json").read_text())
    for _ in range(2):  # again is safe
        assert plots.main(["--results", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in there)
    assert all(f"{name}: not measured" in said for name in set(plots.PLOTS) - set(there))
