"""Rules of the protocol taken away one by one: the chaos harness must notice each.

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

MUTANTS = {
    "commit-before-the-body": Mutant(
        _SWEPT,
        {
            "zapex.nstep_kernels": [
                (
                    "    headers[slot * HEADER_WORDS + COUNT] = 0\n",
                    "    header = slot * HEADER_WORDS; headers[header + COUNT] = 2; "
                    "store_release(headers, header + STATE, state[CLOSED_STATE])\n",
                )
            ]
        },
    ),
    # Not a change of zapex: the parent announces a life that is stopped as dead.
    "slots-back-before-the-pidfd-fired": Mutant(_SWEPT),
    "no-look-at-the-generation-after-a-gather": Mutant(
        _SWEPT,
        {
            "zapex.chunk_store": [
                (
                    "        if (key >> _GENERATION_SHIFT) & GENERATION_MASK == now:\n",
                    "        if now >= 0:\n",
                )
            ]
        },
    ),
    "no-new-generation-at-eviction": Mutant(
        _SWEPT,
        {
            "zapex.slot_ledger": [
                ("(headers[header + GENERATION] + 1) &", "headers[header + GENERATION] &")
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
            "zapex.intake": [
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
        {"zapex.intake": [("if self._replay.store.state(s) == COMMITTED]", "if s < 0]")]},
    ),
    "a-request-is-answered-twice": Mutant(
        {"stuck"},
        {"zapex.shm_transport": [("        if answered > 0:\n", "        if answered > 9:\n")]},
        "replay: answer-given",
    ),
    "published-before-it-is-written": Mutant(
        {"torn"},
        {
            "zapex.shm_mailbox": [
                (
                    "    store_relaxed(words, stamp, 0)\n",
                    "    store_relaxed(words, stamp, version); "
                    "store_release(words, _LATEST_WORD, version * _VERSION_STEP + cell)\n",
                )
            ]
        },
    ),
}
