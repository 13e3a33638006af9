"""Rules of the protocol removed one by one: the chaos harness must notice each.

A change is text of zapex's source and what stands there instead, in as many lines.
"""

from dataclasses import dataclass, field

from tests.stress.steps import Change


@dataclass(frozen=True)
class Mutant:
    """What is changed, what the harness then finds, and the one fault that shows it soonest."""

    finds: set[str]
    changes: dict[str, list[Change]] = field(default_factory=dict)
    only: str = ""


_SWEPT = {"torn", "foreign", "doubled", "lost"}  # which is seen first is a matter of time
_RELEASE = "                # STEP update-applied\n                self._updates.release(1)\n"
_NO_RELEASE = "                # STEP update-applied\n                pass\n"

MUTANTS = {
    "commit-before-the-body": Mutant(
        _SWEPT,
        {
            "zapex.chunks.step_kernels": [
                (
                    "    mem.view(np.int64)[slot * HEADER_WORDS + COUNT] = 0\n",
                    "    headers = mem.view(np.int64); header = slot * HEADER_WORDS; "
                    "headers[header + COUNT] = 2; "
                    "store_release(headers, header + STATE, w.closed_state)\n",
                )
            ]
        },
    ),
    # Not a change of zapex: the parent announces a life that is stopped as dead.
    "slots-back-before-the-pidfd-fired": Mutant(_SWEPT),
    "no-look-at-the-generation-after-a-gather": Mutant(
        _SWEPT,
        {
            "zapex.chunks.store": [
                (
                    "        if (key >> GENERATION_SHIFT) & GENERATION_MASK == now:\n",
                    "        if now >= 0:\n",
                )
            ]
        },
    ),
    "no-new-generation-at-eviction": Mutant(
        _SWEPT,
        {
            "zapex.chunks.ledger": [
                (
                    "headers[header + GENERATION] % GENERATION_MASK + 1",
                    "headers[header + GENERATION]",
                )
            ]
        },
    ),
    "grants-for-any-life": Mutant(
        _SWEPT | {"stuck"},
        {
            "zapex.shm_transport": [
                ('grants["slot"][grants["incarnation"] == self._incarnation]', 'grants["slot"]')
            ]
        },
    ),
    "what-was-granted-was-sent": Mutant(
        {"stuck"},
        {
            "zapex.roles.intake": [
                (
                    "            if rows[slot, GRANT_SEQUENCE] < source.next_grant(actor):\n",
                    "            if source.next_grant(actor) >= 0:\n",
                )
            ]
        },
        "replay: slot-granted",
    ),
    "what-the-dead-had-committed-is-free": Mutant(
        {"lost"},
        {"zapex.roles.intake": [("if self._replay.store.state(s) == COMMITTED]", "if s < 0]")]},
    ),
    "a-request-is-answered-twice": Mutant(
        {"stuck"},
        {"zapex.shm_transport": [("        if answered > 0:\n", "        if answered > 9:\n")]},
        "replay: answer-given",
    ),
    "published-before-it-is-written": Mutant(
        {"torn"},
        {
            "zapex.machine.mailbox": [
                (
                    "    store_relaxed(words, stamp, 0)\n",
                    "    store_relaxed(words, stamp, version); "
                    "store_release(words, _LATEST_WORD, version * _VERSION_STEP + cell)\n",
                )
            ]
        },
    ),
    "an-update-is-released-before-it-is-applied": Mutant(
        {"lost"},
        {
            "zapex.shm_transport": [
                (
                    '                yield record["keys"], record["priorities"]\n',
                    "                record = record.copy(); self._updates.release(1); "
                    'yield record["keys"], record["priorities"]\n',
                ),
                (
                    _RELEASE,
                    _NO_RELEASE,
                ),
            ]
        },
        "replay: ring-released",
    ),
    "an-update-is-not-released": Mutant(
        {"doubled"},
        {
            "zapex.shm_transport": [
                (
                    _RELEASE,
                    _NO_RELEASE,
                )
            ]
        },
    ),
    "an-update-is-of-other-rows": Mutant(
        {"foreign"},
        {
            "zapex.shm_transport": [
                (
                    'record["keys"], record["priorities"] = keys, priorities\n',
                    'record["keys"], record["priorities"] = keys, np.roll(priorities, 1)\n',
                )
            ]
        },
    ),
}
