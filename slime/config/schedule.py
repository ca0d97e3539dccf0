"""The lengths of the learning-rate schedule."""

from __future__ import annotations

from slime.errors import UserError

_ENDLESS = 1 << 40  # rollouts of a run whose length is not known yet


def schedule_lengths(
    *,
    num_rollout: int | None,
    num_critic_only_steps: int,
    num_steps_per_rollout: int,
    global_batch_size: int,
    lr_decay_style: str,
    lr_decay_iters: int | None,
    lr_decay_samples: int | None,
    lr_warmup_iters: int,
    lr_warmup_samples: int,
    lr_warmup_fraction: float | None,
    lr_wsd_decay_iters: int | None,
) -> tuple[int, int, int]:
    """Return (warm-up, decay, whole run) in samples, from the flags of these names.

    Args:
        num_rollout: None for a run of unknown length, which counts as endless.
        num_critic_only_steps: rollouts in which the model does not learn.
    Raises:
        UserError: the decay has no room behind the warm-up.
    """
    rollouts = _ENDLESS if num_rollout is None else max(num_rollout, 1)
    if rollouts > num_critic_only_steps:
        rollouts -= num_critic_only_steps
    total = rollouts * num_steps_per_rollout * global_batch_size
    decay = lr_decay_samples or (lr_decay_iters or 0) * global_batch_size or total
    warmup = lr_warmup_samples or lr_warmup_iters * global_batch_size
    if lr_warmup_fraction is not None:
        warmup = int(lr_warmup_fraction * decay)
    if warmup >= decay and lr_decay_style != "constant":
        raise UserError(
            f"the learning rate warms up for {warmup} samples but decays within {decay}",
            why="the decay counts from the first step of the model, warm-up included",
            fix="lower --lr-warmup-iters, or raise --lr-decay-iters",
        )
    last = (lr_wsd_decay_iters or 0) * global_batch_size
    if lr_decay_style == "WSD" and warmup + last > decay:
        raise UserError(
            f"the learning rate warms up for {warmup} samples and decays for {last}, within "
            f"{decay} in all",
            why="the last phase of WSD would begin before the model has reached --lr",
            fix="lower --lr-wsd-decay-iters, or raise --lr-decay-iters",
        )
    return warmup, max(decay, warmup + 1), total
