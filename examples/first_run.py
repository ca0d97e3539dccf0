"""From a model and a reward to a better model: python examples/first_run.py path/to/model
[steps]"""

import random
import sys

import slime


def reward(response: str, label: str) -> float:
    """1 for the right sum alone, a little for starting with it: something to climb."""
    return 1.0 if response.strip() == label else 0.2 * response.strip().startswith(label)


if __name__ == "__main__":
    model = sys.argv[1]
    steps = int((sys.argv[2:] or ["20"])[0])
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a, b in pairs]
    run = slime.train(
        model,
        rows[:80],
        reward,
        eval_data=rows[80:],
        num_rollout=steps,
        rollout_batch_size=8,
        n_samples_per_prompt=8,
        rollout_max_response_len=8,
        lr=1e-5,
        fp32=True,
        colocate=True,
    )
    print(run)
    print("one of the last answers:", run.samples(-1)[0]["response"])
    print("the model:", run.model)
