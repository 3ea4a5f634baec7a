"""From a pinned contract to what deciding needs of it."""

from __future__ import annotations

from functools import lru_cache

from shared.domain.contract import Contract, OnUncertain
from shared.domain.decide import Terms
from shared.domain.interaction import Verdict


@lru_cache(maxsize=1024)
def terms_of(contract: Contract, interaction_name: str) -> Terms:
    """The terms of one interaction; Unsupported where the contract has none of that name."""
    interaction = contract.interaction(interaction_name)
    profile = contract.session
    return Terms(
        effects=interaction.effects.value,
        claim_timeout_ms=interaction.lease.claim_timeout_ms,
        max_claims=interaction.lease.max_claims,
        max_attempts=interaction.retry.max_attempts,
        backoff_ms=interaction.retry.backoff_ms,
        replay_ms=interaction.replay_ms,
        halt_on_uncertain=profile is not None and profile.on_uncertain is OnUncertain.HALT,
        succeeds=lambda result: interaction.verdict(result) is Verdict.SUCCESS,
        retryable=lambda result: interaction.verdict(result) is Verdict.RETRYABLE,
    )
