"""Find why trainer and engine give different log-probs to the same tokens (`slime align`).

evidence.py      what is compared: samples with both sides' log-probs, token by token
dumps.py         reads the evidence from a run's dumps
reference.py     a third opinion: the model in float32, each part of which can be changed
case.py          the difference under examination, and what a cause is
causes.py        a record per cause; outside.py, inside.py and held.py measure them
engines.py       engines that can still be asked
trainer_here.py  the trainer's model in this process
together.py      several causes at once
arbiter.py       transformers, asked about the reference
layers.py        part by part, by the hidden states of both sides
examine.py       all of it, ranked, in words and in JSON
prepare.py       from a run's flags to an examination
"""
