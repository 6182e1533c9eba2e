"""FLOPs of a decoder's forward, from its configuration: two for each multiplication with its addition."""

from kvpatch_jax.backbone import ForwardCosts

from .config import DecoderConfig, LinearConfig


def forward_costs(config: DecoderConfig) -> ForwardCosts:
    """Counts the FLOPs of all matrix products of a decoder, layer by layer.

    Norms, activations, rotations, convolutions and softmax are not counted. Linear attention costs the same at every
    token, and nothing by pairs: its rule counts as it is written, for state and map, not by blocks. Experts count as a token takes them (one of a text, where
    tokens of images have others), latent attention in absorbed form, as it is computed.
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
        if kind.linear is not None:
            token, pair = _linear_token(kind.linear, width), 0
        elif latent is None:
            own, shared = heads * kind.head_dim, kind.kv_heads * kind.head_dim
            maps = 0 if kind.reads else 1 if kind.keys_are_values else 2
            # With a gate there are twice as many queries.
            token = width * ((3 if config.attention_gate else 2) * own + maps * shared)
            pair = 2 * own
        mlp = 3 * width * (kind.intermediate or config.intermediate) + 2 * width * (config.per_layer or 0)
        # The router, the experts that a token takes (gate, up and down), and their weighted sum.
        if experts is not None and layer >= config.dense_layers:
            inner = experts.chosen * experts.intermediate + experts.shared
            choices = experts.experts + experts.chosen + experts.shared_gate
            mlp = width * (choices + 3 * inner) + (mlp if experts.beside else 0)
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


def _linear_token(config: LinearConfig, width: int) -> int:
    """Counts the multiplications of linear attention per token: its maps, and the rule."""
    values, keys = config.widths["value"], config.widths["query"]
    maps = width * (2 * keys + 3 * values + 2 * config.value_heads)
    # A key meets the state and the map and is written into both; a query meets the state.
    state, map_ = config.key_width * config.value_width, config.key_width**2
    return maps + config.value_heads * (3 * state + 2 * map_)
