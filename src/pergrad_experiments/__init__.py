"""Training runs on real models and data, with any optimizer of pergrad or optax: resumable, and comparable with each other.

A second package on the public API of `pergrad`, which knows nothing of it. `pergrad train TASK` is the way in (`cli`);
from Python, `train.run(config, folder)` does the same and `runs.read(folder)` gives what came out.
"""
