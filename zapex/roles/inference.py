"""The inference role: answers the actors of its host, with one forward pass for all that wait."""

from typing import TYPE_CHECKING

from zapex.host.metrics import RoleMetrics
from zapex.roles.values import Pull
from zapex.transport import QuestionSource

if TYPE_CHECKING:  # it loads torch, which only a maker of policies needs
    from zapex.agent.policy import Acting


class Inference:
    """One duty cycle: the newest parameters, then one answer to each actor that waits.

    It waits for nobody: who asks during a pass is in the next one (docs/decisions.md).
    streams: of each actor.
    """

    def __init__(
        self,
        questions: QuestionSource,
        policy: "Acting",
        pull: Pull,
        metrics: RoleMetrics,
        *,
        streams: int,
    ) -> None:
        self._questions, self._policy, self._pull = questions, policy, pull
        self._metrics, self._streams = metrics, streams
        metrics.enter("other")

    def do_work(self) -> int:
        """Answer whoever waits. Returns how many streams; 0: nobody, or no parameters."""
        metrics = self._metrics
        asked = len(self._questions.find())
        if not asked or not self._pull.newest(asked):
            metrics.enter("idle")
            return 0
        metrics.enter("forward")
        places = self._questions.find()  # more may have asked during the pull
        q = self._policy.q_values(self._questions.items(places))
        metrics.enter("answer")
        self._questions.answer(q, self._pull.version)
        metrics.add("passes")
        metrics.add("answers", len(places))
        metrics.add("streams", len(places) * self._streams)
        metrics.enter("idle")
        return len(places) * self._streams

    def ready(self) -> bool:
        """Whether an actor waits and there are parameters: for `wait(ready, timeout_s)`."""
        return len(self._questions.find()) > 0 and self._pull.ready()

    def close(self) -> None:
        """Stop. Whoever waits is answered by the next incarnation, or ends too."""
        self._metrics.leave()
