"""The generate function for the tasks of letters_taskset.py."""

import sys
from pathlib import Path

from slime.environments.verifiers import VerifiersTaskset

sys.path.append(
    str(Path(__file__).parent)
)  # where verifiers finds the taskset; packages that are installed it finds
TASKSET = VerifiersTaskset("letters_taskset", agent={"max_turns": 1})
generate = TASKSET.generate
