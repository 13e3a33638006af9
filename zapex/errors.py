"""The whole exception tree.

```text
ZapexError
├── ConfigError          a value the user gave cannot work; exit code 2
│   ├── SchemaError      columns, shapes, dtypes or a schema hash that do not fit
│   └── UnknownEnvironment
├── ReplayError
│   ├── NotEnoughData    a sample was asked of a replay that has too little
│   ├── InvalidIndex     an index beyond the tree's capacity; an IndexError too
│   └── InvalidPriority  NaN, infinite or (in the tree) negative
├── SharedMemoryError    shared memory could not be allocated, or is corrupt
├── PeerError
│   ├── PeerDied         the process at the other end is gone
│   ├── PeerTimeout      nothing came before the deadline
│   ├── BadMessage       bytes from a peer that are no message of ours
│   │   └── OtherVersion the peer speaks another version of the protocol
│   ├── Refused          the peer says why it does not want us
│   ├── Fenced           a newer incarnation has taken this role's place
│   └── RunOver          the learner has ended the run: there is nothing more to do
├── Diverged             learning cannot go on: the loss or a TD error is not finite
└── CheckpointError      missing, damaged or of another schema
```
"""


class ZapexError(Exception):
    """Root of everything zapex raises on purpose."""


class ConfigError(ZapexError, ValueError):
    """A value the user gave cannot work; the message says the rule, the value and how to fix it."""


class SchemaError(ConfigError):
    """Columns, shapes, dtypes or a schema hash that do not fit."""


class UnknownEnvironment(ConfigError):
    """No environment has this id; the message names the nearest ones."""


class ReplayError(ZapexError):
    """The replay cannot do what was asked; its state is unchanged."""


class NotEnoughData(ReplayError):
    """A sample was asked of a replay that holds too little."""


class InvalidIndex(ReplayError, IndexError):
    """An index lies outside the memory."""


class InvalidPriority(ReplayError, ValueError):
    """A priority is NaN, infinite or negative where it must not be."""


class SharedMemoryError(ZapexError, OSError):
    """Shared memory could not be allocated, or is corrupt."""


class PeerError(ZapexError):
    """The other end of a link failed."""


class PeerDied(PeerError):
    """The process at the other end is gone."""


class PeerTimeout(PeerError, TimeoutError):
    """Nothing came before the deadline; the message says who was awaited and for how long."""


class BadMessage(PeerError, ValueError):
    """Bytes from a peer that are no message of ours; the message says which rule they break."""


class OtherVersion(BadMessage):
    """The peer speaks another version of the protocol."""


class Refused(PeerError):
    """The peer does not want us: another config, schema, version or role; it says why."""


class Fenced(PeerError):
    """A newer incarnation has taken this role's place."""


class RunOver(PeerError):
    """The run has reached its limit, on whichever host that was counted; it says which."""


class Diverged(ZapexError):
    """Learning cannot go on from these parameters: the loss or a TD error is not finite."""


class CheckpointError(ZapexError):
    """A checkpoint is missing, damaged or of another schema."""


TELLABLE: tuple[type[ZapexError], ...] = (
    ReplayError, NotEnoughData, InvalidIndex, InvalidPriority, ConfigError, SchemaError,
    SharedMemoryError, CheckpointError, PeerError,
)  # fmt: skip
"""What a replay's answer to another process can say; by its place here, so only ever add."""


def tell(error: ZapexError) -> int:
    """An error as a number for another process: 1 + its place in TELLABLE."""
    return 1 + TELLABLE.index(type(error) if type(error) in TELLABLE else PeerError)


def told(number: int, text: str) -> ZapexError:
    """The error that another process told, to be raised here."""
    return TELLABLE[number - 1](text)
