"""Does one all-reduce and writes its time: first_step.py FOLDER. In the first attempt, worker 1 then exits with 143.

In the second attempt, every worker ends after its all-reduce.
"""

import json
import os
import sys
import time
from pathlib import Path

import tensorflow as tf

folder = Path(sys.argv[1])
task = json.loads(os.environ["TF_CONFIG"])["task"]
strategy = tf.distribute.MultiWorkerMirroredStrategy()


@tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
def step() -> tf.Tensor:
    return strategy.reduce("sum", strategy.run(lambda: tf.constant(1.0)), axis=None)


step()
now = time.time()
died = folder / "died"
if died.exists():
    (folder / f"again-{task['index']}").write_text(str(now))
    sys.exit()
(folder / f"first-{task['index']}").write_text(str(now))
while task["index"] == 1 and not (folder / "first-0").exists():
    time.sleep(0.01)
if task["index"] == 1:
    died.write_text(str(time.time()))
    os._exit(143)  # the first process of a container cannot kill itself
while True:
    step()
