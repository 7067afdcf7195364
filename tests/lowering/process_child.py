"""A process of the demo that something happens to: `jaxops._demo.worker`, with what HAPPENS says, as JSON.

{"process": 1, "killed_at": 5} kills the process when it is to take step 5; {"process": 1, "jax": "0.1"} has other
versions; {"process": 1, "tuned": FOLDER} has found other things.
"""

import json
import os
import signal
import sys

import jax
import typer

from jaxops._demo import split_training, worker

HAPPENS = json.loads(os.environ.get("HAPPENS", "{}"))
batch = split_training.batch


def batch_or_death(training, over, text, number):
    if number == HAPPENS["killed_at"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch(training, over, text, number)


if HAPPENS.get("process") == int(sys.argv[sys.argv.index("--process") + 1]):
    if "killed_at" in HAPPENS:
        split_training.batch = batch_or_death
    if "jax" in HAPPENS:
        jax.__version__ = HAPPENS["jax"]
    if "tuned" in HAPPENS:
        os.environ["JAXOPS_TUNED"] = HAPPENS["tuned"]

typer.run(worker.main)
