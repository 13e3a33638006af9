"""Shards on the command line: what cannot be is one line and exit code 2."""

import pytest

from zapex.cli import main as cli


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("replay", "--shards", "2", "--shard", "2"), "0 to 1 of --shards 2, got 2"),
        (("replay", "--shard", "1"), "give --shards, too"),
        (("replay", "--shards", "0"), "1 to 128 shards, got 0"),
        (("replay", "--shards", "2", "--with-learner"), "--with-learner is for one replay"),
        (("actor", "--replay", "tcp://127.0.0.1:1,tcp://127.0.0.1:1"), "names each shard once"),
        (("learner", "--replay", "tcp://127.0.0.1:1,htp://b"), "htp://b"),
        (("learner", "--replay", "tcp://127.0.0.1:1,"), "--replay"),
    ],
)  # fmt: skip
def test_shards_that_cannot_be_are_refused_before_anything_starts(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words, "--env", "CartPole-v1", "--preset", "smoke"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert not list(tmp_path.iterdir())
