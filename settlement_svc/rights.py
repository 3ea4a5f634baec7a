"""The right to work that was admitted: what is asked of the policy, always for the original invoker."""

from __future__ import annotations

from shared.domain.contract import Contract
from shared.domain.decide import Rights
from shared.domain.policy import Action, Authorization, AuthorizationInput, Policy
from shared.domain.records import Admission


def question(
    admission: Admission, contract: Contract, action: Action, branch: int, peer: str, attempt: int
) -> AuthorizationInput:
    """Whether ``peer`` may do ``action`` with the branch of index ``branch`` as that attempt (RT-AUTH-01).

    The principal stays who invoked; the peer is a member of its own (RT-CTX-03, RT-CTX-04).
    """
    in_session = admission.session_id != ""
    profile = contract.session if in_session else None
    return AuthorizationInput(
        principal=admission.principal,
        action=action,
        session_id=admission.session_id,
        owner=(admission.session_owner or admission.principal) if in_session else "",
        profile=profile.id if profile is not None else "",
        contract=admission.contract,
        interaction=admission.interaction,
        peer=peer,
        branch=admission.branches[branch],
        attempt=attempt,
    )


def rights_of(policy: Policy, admission: Admission, contract: Contract, now_ms: int) -> Rights:
    """The rights of an operation's invoker under a policy, as of the store's time ``now_ms``.

    Asking raises Unavailable where the policy cannot be read (RT-AUTH-05).
    """
    if not policy.applies:
        always = policy.granted(now_ms)
        return lambda _action, _branch, _peer, _attempt: always

    def ask(action: Action, branch: int, peer: str, attempt: int) -> Authorization:
        return policy.decide(question(admission, contract, action, branch, peer, attempt), now_ms)

    return ask
