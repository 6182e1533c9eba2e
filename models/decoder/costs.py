"""FLOPs of a decoder's forward, from its configuration: two for each multiplication with its addition."""

from kvpatch_jax.backbone import ForwardCosts

from .config import DecoderConfig


def forward_costs(config: DecoderConfig) -> ForwardCosts:
    """Counts the FLOPs of all matrix products of a decoder, layer by layer.

    Norms, activations, rotations and softmax are not counted. Experts count as a token takes them, latent attention in
    absorbed form, as it is computed.
    """
    width, heads, latent, experts = config.width, config.heads, config.latent, config.experts

    # Multiplications of one layer's attention: per token, and per query and key.
    if latent is None:
        own, shared = heads * config.head_dim, config.kv_heads * config.head_dim
        token, pair = width * (2 * own + 2 * shared), 2 * own
    else:
        queries = heads * (latent.plain_dim + latent.rope_dim)
        rank = latent.query_rank
        query = width * queries if rank is None else (width + queries) * rank
        down = width * (latent.latent + latent.rope_dim)
        absorbed = heads * latent.latent * (latent.plain_dim + latent.value_dim)
        output = heads * latent.value_dim * width
        # A head's query meets the latent and the rotary key, and its weights meet the latent again.
        token, pair = query + down + absorbed + output, heads * (2 * latent.latent + latent.rope_dim)

    tokens, windows = [], []
    for layer in range(config.layers):
        mlp = 3 * width * config.intermediate
        # The router, the experts that a token takes (gate, up and down), and their weighted sum.
        if experts is not None and layer >= config.dense_layers:
            inner = experts.chosen * experts.intermediate + experts.shared
            mlp = width * (experts.experts + 3 * inner + experts.chosen)
        tokens.append(2 * (token + mlp))
        windows.append(config.layer_kinds[layer].window or 0)

    return ForwardCosts(
        token=tuple(tokens),
        pair=(2 * pair,) * config.layers,
        window=tuple(windows),
        logit=2 * width * config.vocabulary,
    )
