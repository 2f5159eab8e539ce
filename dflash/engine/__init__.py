"""What makes the loop faster and never decides a token: the package's own, attached to its classes.

| file | adds |
|---|---|
| `lookup` | proposals from the text itself |
| `trees` | several paths of the drafter, verified together |
| `widths` | as many proposals as pay |
| `windows` | a drafter that reads the first and the newest tokens alone |
| `whole` | the whole step as one function of device state |
| `steps` | when a step runs whole, and what holds it to eager steps |
| `compiled` | that function compiled by Inductor |
| `recorded` | that function recorded as a CUDA graph |
| `together` | criteria that look at all texts of a batch |
| `runner` | which of them a request gets |
| `batching` | a batch whose rows belong to requests of their own |
| `conversations` | the caches of texts that have ended, for prompts that go on from them |
| `history` | proposals from earlier texts, for many texts at once |
| `manager` | many texts at once: `generate_batch`, and a manager for requests that come at any time |

A checkpoint's own code has none of it and refuses its keywords by name.
"""

from typing import Any

from .conversations import KeptConversations
from .options import check_keywords
from .runner import EngineDecoder as decoder
from .state import PairState
from .together import of_batch
from .trees import TreeAcceptor as acceptor


__all__ = ["acceptor", "check_keywords", "decoder", "fallback_reason", "keep_conversations", "of_batch"]


def keep_conversations(drafter: Any, most: int) -> None:
    """Has each request of one prompt go on from the caches of an earlier text, of which the `most` used last are kept."""
    # An attribute, and no state of the process: they hold the models.
    drafter.kept_conversations = KeptConversations(most) if most else None


def fallback_reason(drafter: Any, target: Any) -> str | None:
    """Why compiled or recorded steps of a drafter and a target run eagerly; `None`: nothing fell back."""
    reasons = PairState.of(drafter, target).reasons
    return next(iter(reasons.values()), None)
