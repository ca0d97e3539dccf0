"""Find why trainer and engine give different log-probs to the same tokens (`slime align`).

evidence.py      what is compared: samples with both sides' log-probs, token by token
dumps.py         reads the evidence from a run's dumps
reference.py     a third opinion: the model in float32, each part of which can be changed
sight.py         how the reference looks at images
case.py          the difference under examination, and what a cause is
outside.py       causes outside the model: tokens, context, temperature, filters
inside.py        causes inside it: positions, quantisation, experts, precision
vision.py        causes in images: positions, tower and projector, preparation
held.py          causes in the engine: its weights, and its answers when it is asked again
engines.py       engines that can still be asked
trainer_here.py  the trainer's model in this process
layers.py        compares the hidden states of both sides part by part
examine.py       measures and ranks all causes, and formats the result
prepare.py       from a run's flags to an examination
"""
