"""Who is right about the reference: transformers computes the same tokens once more, with code of
its own.

Reference and embedded engine share theirs, so that a mistake in it would look like one of the
trainer's.
"""

from __future__ import annotations

import torch

from slime.diagnosis.align.case import Discrepancy
from slime.diagnosis.align.evidence import size


@torch.inference_mode()
def by_transformers(case: Discrepancy) -> float:
    """How far the reference is from transformers, on the first sample: mean over its response, nats
    per token.

    Raises:
        OSError, ValueError, KeyError, ImportError: transformers cannot read the model.
    """
    from transformers import AutoModelForCausalLM

    model = case.model()
    sample = case.samples[0]
    device = model.store.device
    theirs = AutoModelForCausalLM.from_pretrained(
        model.directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    theirs = theirs.eval().to(device)
    for parameter in theirs.parameters():
        parameter.copy_(parameter.to(model.dtype))
    rows = theirs(sample.tokens[None, :-1].to(device)).logits[0, sample.prompt_length - 1 :].float()
    log_probs = torch.log_softmax(rows / model.setting.sampling.temperature, dim=-1)
    targets = sample.tokens[sample.prompt_length :, None].to(device)
    return size(log_probs.gather(1, targets)[:, 0].double().cpu() - case.base[0])
