"""Plans: which way of reuse each chunk of a window gets, what that costs, and what it was certified to lose."""

from .certificate import Certificate, Certified, CertifiedPlan, Rank

__all__ = [
    "Certificate",
    "Certified",
    "CertifiedPlan",
    "Rank",
]
