"""Token objectives: the cases C3, C4, C19, C20, masks, the other ratios, and truncated importance sampling."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gyre.config import LossSection
from gyre.errors import BadInput
from gyre.loss.objectives import token_losses
from gyre.loss.weights import batch_weight, run_weight

KINDS = ("gspo", "grpo", "dapo", "cispo")
GSPO = LossSection()
WIDE = LossSection(clip_low=0.2, clip_high=0.28)

torch.set_num_threads(1)


def policy(values: list[float] | list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def everywhere(logp: Tensor) -> Tensor:
    return torch.ones_like(logp, dtype=torch.bool)


def objective_and_gradient(kind: str, ratio: float, advantage: float, loss: LossSection = GSPO) -> tuple[float, float]:
    """Of one token whose probability is `ratio` times what it was sampled with."""
    logp = policy([-1.0])
    losses, _ = token_losses(kind, logp, logp.detach() - math.log(ratio), everywhere(logp), advantage, loss)
    losses.sum().backward()
    assert logp.grad is not None
    return -losses.item(), -logp.grad.item()


# ------------------------------------------------------------------------------------------------ C19, C20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.3, 0.0])
def test_c19_before_any_update_nothing_is_clipped_and_the_gradient_is_the_policy_gradient(
    kind: str, advantage: float
) -> None:
    logp = policy([[-0.5, -2.0, -0.1], [-3.0, -0.2, -1.0]])
    losses, metrics = token_losses(kind, logp, logp.detach().clone(), everywhere(logp), advantage, GSPO)
    losses.sum().backward()
    assert logp.grad is not None
    assert torch.equal(logp.grad, torch.full_like(logp, -advantage))
    assert metrics["clipped_count"] == 0
    assert metrics["ratio_deviation_sum"] == 0
    assert metrics["kl_sum"] == 0
    if kind != "cispo":
        assert torch.equal(losses, torch.full_like(logp, -advantage))


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "gradient"),
    [
        (1.0006, 1.0, 1.0004, 0.0),
        (1.0006, -1.0, -1.0006, -1.0006),
        (0.9995, -1.0, -0.9997, 0.0),
        (0.9995, 1.0, 0.9995, 0.9995),
    ],
)
def test_c20_the_clip_takes_the_gradient_only_where_the_objective_is_past_its_bound(
    ratio: float, advantage: float, objective: float, gradient: float
) -> None:
    assert objective_and_gradient("gspo", ratio, advantage) == pytest.approx((objective, gradient), abs=1e-9)


@pytest.mark.parametrize(("ratio", "advantage", "clipped"), [(1.0006, 1.0, 1), (1.0006, -1.0, 0), (0.9995, -1.0, 1)])
def test_c20_clipped_tokens_are_counted(ratio: float, advantage: float, clipped: int) -> None:
    logp = policy([-1.0, -2.0])
    _, metrics = token_losses("gspo", logp, logp.detach() - math.log(ratio), everywhere(logp), advantage, GSPO)
    assert metrics["clipped_count"] == 2 * clipped
    assert metrics["token_count"] == 2
    assert metrics["lineage_count"] == 1
    assert metrics["ratio_deviation_sum"] == pytest.approx(2 * abs(ratio - 1), rel=1e-6)
    assert metrics["logp_gap_sum"] == pytest.approx(2 * abs(math.log(ratio)), rel=1e-6)


# ------------------------------------------------------------------------------------------------ gspo


def test_the_gspo_ratio_is_that_of_the_whole_lineage_and_the_gradient_each_tokens_own() -> None:
    logp = policy([[-1.0, -2.0, -3.0]])
    gaps = torch.tensor([[0.3, -0.1, 0.1]], dtype=torch.float64)
    losses, _ = token_losses("gspo", logp, logp.detach() - gaps, everywhere(logp), 2.0, WIDE)
    losses.sum().backward()
    ratio = math.exp((0.3 - 0.1 + 0.1) / 3)
    assert losses.tolist() == [pytest.approx([-2.0 * ratio] * 3)]
    assert logp.grad is not None
    assert logp.grad.tolist() == [pytest.approx([-2.0 * ratio] * 3)]


def test_the_token_form_has_the_gradient_of_the_sequence_form() -> None:
    """GSPO's own objective is s·A for a sequence; its gradient is the mean of the token form's."""
    gaps = torch.tensor([0.02, -0.05, 0.01, 0.04], dtype=torch.float64)
    token_form, sequence_form = policy([-1.0, -0.5, -2.0, -0.1]), policy([-1.0, -0.5, -2.0, -0.1])
    behaviour = token_form.detach() - gaps
    losses, _ = token_losses("gspo", token_form, behaviour, everywhere(token_form), 0.7, WIDE)
    losses.mean().backward()
    (-0.7 * torch.exp((sequence_form - behaviour).mean())).backward()
    assert token_form.grad is not None
    assert sequence_form.grad is not None
    torch.testing.assert_close(token_form.grad, sequence_form.grad)


def test_a_masked_token_leaves_the_count_of_the_mean_as_well_as_its_sum() -> None:
    logp = policy([[-1.0, -2.0, -3.0, -1.0]])
    behaviour = logp.detach() - torch.tensor([[0.1, 5.0, 0.3, -7.0]], dtype=torch.float64)
    counted = torch.tensor([[True, False, True, False]])
    losses, metrics = token_losses("gspo", logp, behaviour, counted, 1.0, LossSection(clip_low=1.0, clip_high=1.0))
    ratio = math.exp((0.1 + 0.3) / 2)
    assert losses.tolist() == [pytest.approx([-ratio, 0.0, -ratio, 0.0])]
    assert metrics["token_count"] == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("truncate_is", [0.0, 2.0])
@pytest.mark.parametrize("rubbish", [0.0, float("inf"), float("-inf"), float("nan")])
def test_nothing_behind_the_mask_reaches_loss_metrics_or_gradient(
    kind: str, truncate_is: float, rubbish: float
) -> None:
    loss = LossSection(clip_low=0.2, clip_high=0.28, truncate_is=truncate_is)
    counted = torch.tensor([[True, False, True], [False, False, False]])
    logp = policy([[-1.0, rubbish, -0.5], [rubbish, -1.0, -2.0]])
    behaviour = torch.tensor([[-1.1, -3.0, -0.4], [-1.0, rubbish, -2.0]], dtype=torch.float64)
    losses, metrics = token_losses(kind, logp, behaviour, counted, torch.tensor([1.0, -1.0]), loss)
    losses.sum().backward()
    alone = policy([-1.0, -0.5])
    expected, expected_metrics = token_losses(
        kind, alone, torch.tensor([-1.1, -0.4], dtype=torch.float64), everywhere(alone), 1.0, loss
    )
    expected.sum().backward()
    assert logp.grad is not None
    assert alone.grad is not None
    assert losses[counted].tolist() == pytest.approx(expected.tolist())
    assert losses[~counted].tolist() == [0.0] * 4
    assert logp.grad[counted].tolist() == pytest.approx(alone.grad.tolist())
    assert logp.grad[~counted].tolist() == [0.0] * 4
    assert metrics == pytest.approx(expected_metrics)


# ------------------------------------------------------------------------------------------------ other ratios


@pytest.mark.parametrize(
    ("kind", "ratio", "advantage", "objective", "gradient"),
    [
        ("grpo", 1.25, 1.0, 1.2, 0.0),
        ("dapo", 1.25, 1.0, 1.25, 1.25),
        ("dapo", 1.4, 1.0, 1.28, 0.0),
        ("grpo", 0.7, -1.0, -0.8, 0.0),
        ("dapo", 0.7, -1.0, -0.8, 0.0),
        ("grpo", 0.7, 1.0, 0.7, 0.7),
        ("dapo", 1.4, -1.0, -1.4, -1.4),
    ],
)
def test_token_ratios_clip_symmetrically_in_grpo_and_higher_in_dapo(
    kind: str, ratio: float, advantage: float, objective: float, gradient: float
) -> None:
    assert objective_and_gradient(kind, ratio, advantage, WIDE) == pytest.approx((objective, gradient), abs=1e-9)


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_a_token_ratio_is_each_tokens_own(kind: str) -> None:
    logp = policy([[-1.0, -2.0]])
    behaviour = logp.detach() - torch.tensor([[math.log(1.1), math.log(0.9)]], dtype=torch.float64)
    losses, _ = token_losses(kind, logp, behaviour, everywhere(logp), 1.0, WIDE)
    assert losses.tolist() == [pytest.approx([-1.1, -0.9])]


@pytest.mark.parametrize(("ratio", "weight"), [(1.1, 1.1), (3.0, 1.28), (0.5, 0.8)])
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_cispo_clips_the_weight_and_keeps_every_tokens_gradient(ratio: float, weight: float, advantage: float) -> None:
    _, gradient = objective_and_gradient("cispo", ratio, advantage, WIDE)
    assert gradient == pytest.approx(weight * advantage)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.5), (1.5, 1.5), (40.0, 2.0)])
def test_truncated_importance_sampling_weighs_each_token_by_its_capped_ratio(
    kind: str, ratio: float, weight: float
) -> None:
    loss = LossSection(clip_low=0.2, clip_high=0.28, truncate_is=2.0)
    _, gradient = objective_and_gradient(kind, ratio, 1.0, loss)
    assert gradient == pytest.approx(weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gap", [300.0, -300.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_absurd_ratio_leaves_loss_and_gradient_finite(kind: str, gap: float, advantage: float) -> None:
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    losses, metrics = token_losses(kind, logp, logp.detach() - gap, everywhere(logp), advantage, WIDE)
    losses.sum().backward()
    assert logp.grad is not None
    assert torch.isfinite(logp.grad).all()
    assert torch.isfinite(losses).all()
    assert all(math.isfinite(value) for value in metrics.values())


def test_half_precision_log_probs_are_judged_in_float32() -> None:
    logp = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    losses, metrics = token_losses("gspo", logp, torch.tensor([-1.0, -2.0]), everywhere(logp), 1.0, GSPO)
    assert losses.dtype is torch.float32
    assert metrics["clipped_count"] == 0


# ------------------------------------------------------------------------------------------------ C3, C4


def batch_gradient(weights: Tensor, runs: list[list[Tensor]], micro_steps: list[list[tuple[int, int]]]) -> Tensor:
    """The batch's gradient on a toy policy, worked off in `micro_steps` of (run, lineage), padded to a rectangle."""
    advantages = [(-1.0) ** run * (1 + run) for run in range(len(runs))]
    total = torch.zeros_like(weights)
    for members in micro_steps:
        width = max(len(runs[run][lineage]) for run, lineage in members)
        parameters = weights.clone().requires_grad_()
        logps, behaviours, counted = [], [], []
        for run, lineage in members:
            tokens = runs[run][lineage]
            padding = (0, width - len(tokens))
            logp = torch.log_softmax(parameters, 0)[tokens]
            logps.append(torch.nn.functional.pad(logp, padding))
            behaviours.append(torch.nn.functional.pad(torch.log_softmax(weights * 1.01, 0)[tokens], padding, value=9.0))
            counted.append(torch.arange(width) < len(tokens))
        losses, _ = token_losses(
            "gspo",
            torch.stack(logps),
            torch.stack(behaviours),
            torch.stack(counted),
            torch.tensor([advantages[run] for run, _ in members], dtype=torch.float64),
            WIDE,
        )
        per_run = torch.tensor([run_weight(sum(map(len, runs[run]))) for run, _ in members], dtype=torch.float64)
        (losses.sum(-1) * per_run).sum().backward()
        assert parameters.grad is not None
        total += parameters.grad
    return total * batch_weight(len(runs))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=4), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_c4_every_split_order_and_padding_of_a_batch_gives_the_same_gradient(
    shape: list[list[int]], order: random.Random
) -> None:
    generator = torch.Generator().manual_seed(order.randint(0, 10**6))
    weights = torch.randn(5, generator=generator, dtype=torch.float64)
    runs = [[torch.randint(0, 5, (n,), generator=generator) for n in lineages] for lineages in shape]
    members = [(run, lineage) for run, lineages in enumerate(shape) for lineage in range(len(lineages))]
    whole = batch_gradient(weights, runs, [members])
    order.shuffle(members)
    cuts = sorted(order.sample(range(1, len(members) + 1), k=order.randint(0, len(members) - 1)))
    edges = zip([0, *cuts], [*cuts, len(members)], strict=True)
    split = batch_gradient(weights, runs, [members[start:stop] for start, stop in edges if stop > start])
    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-12)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_metric_sums_add_up_over_micro_steps(lengths: list[int], order: random.Random) -> None:
    rows = [
        (
            torch.tensor([-order.random() for _ in range(n)], dtype=torch.float64),
            torch.tensor([-order.random() for _ in range(n)], dtype=torch.float64),
        )
        for n in lengths
    ]
    apart = [token_losses("gspo", p, q, everywhere(p), 1.0, WIDE)[1] for p, q in rows]
    width = max(lengths)
    logp, behaviour = (
        torch.stack([torch.nn.functional.pad(row[side], (0, width - len(row[side]))) for row in rows])
        for side in (0, 1)
    )
    counted = torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)
    _, together = token_losses("gspo", logp, behaviour, counted, 1.0, WIDE)
    assert together == pytest.approx({name: sum(part[name] for part in apart) for name in together})


# ------------------------------------------------------------------------------------------------ bad input, import


def test_an_unknown_kind_is_refused_by_name() -> None:
    logp = policy([-1.0])
    with pytest.raises(BadInput, match=r"loss\.kind: 'ppo' is not allowed; one of gspo, grpo, dapo, cispo"):
        token_losses("ppo", logp, logp.detach(), everywhere(logp), 1.0, GSPO)


def test_shapes_that_differ_are_refused() -> None:
    logp = policy([-1.0, -2.0])
    with pytest.raises(BadInput, match=r"\(2,\), \(1,\), \(2,\).*equal shapes"):
        token_losses("gspo", logp, torch.tensor([-1.0]), everywhere(logp), 1.0, GSPO)


def test_the_package_is_imported_without_torch() -> None:
    code = (
        "import sys, gyre.loss, gyre.loss.objectives, gyre.loss.advantages, gyre.loss.weights\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
