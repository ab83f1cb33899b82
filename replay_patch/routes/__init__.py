"""Routes in motion: what lies between a rollout engine and a router. Needs no Megatron.
`Routes` is one trajectory, `RouteBatch` a list of them, and `TokenLayout` says where the tokens of
a microbatch are in the model input and in the router rows of a rank."""

from replay_patch.routes.batch import RouteBatch
from replay_patch.routes.batch_fields import select_fields
from replay_patch.routes.routes import Routes
from replay_patch.routes.token_layout import TokenLayout

__all__ = ["RouteBatch", "Routes", "TokenLayout", "select_fields"]
