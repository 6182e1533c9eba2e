"""FLOPs of a decoder's forward, from its configuration: two for each multiplication with its addition."""

from kvpatch_jax.backbone import ForwardCosts

from .config import DecoderConfig, LinearConfig

RULE_BLOCK = 64
"""Tokens that the rule of linear attention computes at once (`core.delta_rule`)."""


def forward_costs(config: DecoderConfig) -> ForwardCosts:
    """Counts the FLOPs of all matrix products of a decoder, layer by layer.

    Norms, activations, rotations and softmax are not counted. Experts count as a token takes them (one of a text, where
    tokens of images have others), latent attention in absorbed form, as it is computed. Linear attention counts as
    it is computed behind a context, with the map of its transition, in whole blocks of `RULE_BLOCK` tokens; without a
    context, and in shorter blocks, it takes less.
    """
    width, heads, latent, experts = config.width, config.heads, config.latent, config.experts

    # Multiplications of one layer's attention: per token, and per query and key.
    token, pair = 0, 0
    if latent is not None:
        queries = heads * (latent.plain_dim + latent.rope_dim)
        rank = latent.query_rank
        query = width * queries if rank is None else (width + queries) * rank
        down = width * (latent.latent + latent.rope_dim)
        absorbed = heads * latent.latent * (latent.plain_dim + latent.value_dim)
        output = heads * latent.value_dim * width
        # A head's query meets the latent and the rotary key, and its weights meet the latent again.
        token, pair = query + down + absorbed + output, heads * (2 * latent.latent + latent.rope_dim)

    tokens, pairs, windows = [], [], []
    for layer, kind in enumerate(config.layer_kinds):
        if latent is None:
            own, shared = heads * kind.head_dim, kind.kv_heads * kind.head_dim
            maps = 0 if kind.reads else 1 if kind.keys_are_values else 2
            token, pair = width * ((3 if config.attention_gate else 2) * own + maps * shared), 2 * own
        if kind.linear is not None:
            token, pair = _linear_products(kind.linear, width), 0
        mlp = 3 * width * (kind.intermediate or config.intermediate) + 2 * width * (config.per_layer or 0)
        # The router, the experts that a token takes (gate, up and down), and their weighted sum.
        if experts is not None and layer >= config.dense_layers:
            inner = experts.chosen * experts.intermediate + experts.shared
            mlp = width * (experts.experts + 3 * inner + experts.chosen) + (mlp if experts.beside else 0)
            mlp += width * experts.shared_gate
        # The map from the embedding to what every layer takes of a token is counted with the layers.
        mlp += width * (config.per_layer or 0)
        tokens.append(2 * (token + mlp))
        pairs.append(2 * pair)
        windows.append(kind.window or 0)

    return ForwardCosts(
        token=tuple(tokens),
        pair=tuple(pairs),
        window=tuple(windows),
        logit=2 * width * config.vocabulary,
    )


def _linear_products(linear: LinearConfig, width: int) -> int:
    """Counts multiplications per token of a layer with linear attention: its maps, and the rule in the WY form."""
    keys, values, heads = linear.key_width, linear.value_width, linear.value_heads
    inputs = sum(linear.widths.values()) + linear.widths["value"] + 2 * heads
    maps = width * (inputs + linear.widths["value"])

    # Queries and keys meet the block's keys; its system is inverted, and solved for values and keys.
    block = 2 * RULE_BLOCK * keys + (RULE_BLOCK**2 - 1) // 3 + RULE_BLOCK * (keys + 2 * values)
    # Each state is read and written: that behind all tokens, that behind these alone, and the map.
    states = keys * values + 2 * keys * (2 * values + keys)
    return maps + heads * (block + states)
