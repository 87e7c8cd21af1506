"""The token losses ℓ of DESIGN §7, for a padded batch of lineages.

The replica gives the policy's log-probs (with gradient), the behaviour log-probs, which tokens are counted, and each
lineage's advantage. It gets a loss for every token, which is 0 where the token is not counted; it sums them weighted
by 1/T_i and divides once by |R|. Every `kind` has one term a counted token, so that splitting work changes nothing:

    gspo    -min(s·A, clip(s)·A), s the lineage's ratio exp(mean over its counted tokens of (log p - log q)), whose
            gradient goes through each token's own log p; clip to [1 - clip_low, 1 + clip_high]
    grpo    -min(r·A, clip(r)·A), r the token's ratio p/q; clip to [1 - clip_low, 1 + clip_low]
    dapo    the same with the wider upper side ("clip-higher"): [1 - clip_low, 1 + clip_high]
    cispo   -clip(r)·A·log p, no gradient through clip(r): a clipped token keeps its gradient

With `truncate_is` C > 0 the ratio is taken against the log-probs recomputed by the trainer, and each token is weighted
by min(p/q, C), C being its cap (truncated importance sampling). There is one optimizer step a batch, so the recomputed
log-probs are those at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.config import LossSection
from gyre.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_GAP = 20.0
"""Log-ratios are held within ± this: e^20 is beyond every clip, and an infinite ratio would make its gradient NaN."""


def token_losses(
    kind: str,
    logp: Tensor,
    behaviour: Tensor,
    counted: Tensor,
    advantage: Tensor | float,
    loss: LossSection,
) -> tuple[Tensor, dict[str, float]]:
    """(losses, metric sums) of lineages `[B, T]`, or of one lineage `[T]`.

    `logp` and `behaviour` are log p and log q of each token, whatever they are where `counted` is false;
    `advantage` is one number, or one a row `[B]`. Metrics are sums over counted tokens (`lineage_count`: over
    lineages with any), so that they add up over micro-steps and cells:

        token_count, lineage_count, loss_sum
        clipped_count         tokens whose gradient the clip took (cispo: whose weight it changed)
        kl_sum                the estimate p/q - 1 - log p/q of KL(q || p), from the tokens' own ratios
        ratio_deviation_sum   |s - 1| (gspo) or |r - 1|: before any update, the mismatch of engine and trainer
        logp_gap_sum          |log p - log q|
    """
    import torch

    if kind not in ("gspo", "grpo", "dapo", "cispo"):
        raise BadInput("loss.kind", kind, "one of gspo, grpo, dapo, cispo")
    if not logp.shape == behaviour.shape == counted.shape:
        shapes = f"{tuple(logp.shape)}, {tuple(behaviour.shape)}, {tuple(counted.shape)}"
        raise BadInput("logp, behaviour, counted", shapes, "equal shapes")
    mask = counted.bool()
    exact = torch.promote_types(logp.dtype, torch.float32)
    # Zero where not counted, before anything can overflow there.
    policy = torch.where(mask, logp.to(exact), 0.0)
    gap = torch.where(mask, policy.detach() - behaviour.to(exact), 0.0).clamp(-_LARGEST_GAP, _LARGEST_GAP)
    gain = torch.as_tensor(advantage, dtype=exact, device=logp.device)
    gain = (gain.unsqueeze(-1) if gain.dim() else gain).expand_as(policy)

    token_ratio = torch.exp(gap)
    reference = torch.zeros_like(gap) if loss.truncate_is else gap
    if kind == "gspo":
        counts = mask.sum(-1, keepdim=True)
        ratio = torch.exp(reference.sum(-1, keepdim=True) / counts.clamp(min=1)).expand_as(policy)
    else:
        ratio = torch.exp(reference)
    low, high = 1.0 - loss.clip_low, 1.0 + (loss.clip_low if kind == "grpo" else loss.clip_high)
    within = ratio.clamp(low, high)
    if kind == "cispo":
        clipped = ratio != within
        objective = within * gain * policy
    else:
        clipped = ((gain > 0) & (ratio > high)) | ((gain < 0) & (ratio < low))
        # exp(log p - log p) is 1 with the gradient of log p.
        objective = gain * torch.where(clipped, within, ratio * torch.exp(policy - policy.detach()))
    if loss.truncate_is:
        objective = objective * token_ratio.clamp(max=loss.truncate_is)
    losses = torch.where(mask, -objective, 0.0)

    with torch.no_grad():
        sums = {
            "token_count": mask,
            "lineage_count": mask.any(-1),
            "loss_sum": losses,
            "clipped_count": clipped & mask,
            "kl_sum": torch.where(mask, token_ratio - 1.0 - gap, 0.0),
            "ratio_deviation_sum": torch.where(
                mask, (torch.exp(_mean(gap, mask)) if kind == "gspo" else token_ratio) - 1.0, 0.0
            ).abs(),
            "logp_gap_sum": gap.abs(),
        }
        values = torch.stack([value.detach().double().sum() for value in sums.values()]).tolist()
    return losses, dict(zip(sums, values, strict=True))


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of each row's counted values, in every place of the row; `values` are 0 elsewhere."""
    return (values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(values)
