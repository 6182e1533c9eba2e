"""FLOPs of a decoder's forward, from its configuration: two for each multiplication with its addition."""

from kvpatch_jax.backbone import ForwardCosts

from .config import DecoderConfig


def forward_costs(config: DecoderConfig) -> ForwardCosts:
    """Counts the FLOPs of all matrix products of a decoder, layer by layer.

    Norms, activations, rotations and softmax are not counted. Experts count as a token takes them, latent attention in
    absorbed form, as it is computed.
    """
    layers = range(config.layers)
    token, pair = _attention(config)
    return ForwardCosts(
        token=tuple(2 * (token + _mlp(config, layer)) for layer in layers),
        pair=(2 * pair,) * config.layers,
        window=tuple((config.window or 0) if config.slides(layer) else 0 for layer in layers),
        logit=2 * config.width * config.vocabulary,
    )


def _attention(config: DecoderConfig) -> tuple[int, int]:
    """Multiplications of one layer's attention: per token, and per query and key."""
    width, heads, latent = config.width, config.heads, config.latent
    if latent is None:
        own, shared = heads * config.head_dim, config.kv_heads * config.head_dim
        return width * (2 * own + 2 * shared), 2 * own

    queries = heads * (latent.plain_dim + latent.rope_dim)
    rank = latent.query_rank
    query = width * queries if rank is None else (width + queries) * rank
    down = width * (latent.latent + latent.rope_dim)
    absorbed = heads * latent.latent * (latent.plain_dim + latent.value_dim)
    output = heads * latent.value_dim * width
    return query + down + absorbed + output, heads * (2 * latent.latent + latent.rope_dim)


def _mlp(config: DecoderConfig, layer: int) -> int:
    """Multiplications per token of one layer's MLP, or of its router, of the experts it takes and of their sum."""
    experts = config.experts
    if experts is None or layer < config.dense_layers:
        return 3 * config.width * config.intermediate
    inner = experts.chosen * experts.intermediate + experts.shared
    return config.width * (experts.experts + 3 * inner + experts.chosen)
