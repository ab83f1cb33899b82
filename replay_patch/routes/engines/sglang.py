"""SGLang, started with `--enable-return-routed-experts`.
`routed_experts` in a response's `meta_info` is base64 of flat ids, for all layers of the model."""

from replay_patch.routes.responses.engine import Engine

ENGINE = Engine(
    fields=("routed_experts",),
    layers="all",
    switch="--enable-return-routed-experts, and return_routed_experts in the request",
)
