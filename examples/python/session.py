"""What a chat is made of: a tokenizer, one session, and a loop of prefill, draw, decode.

python session.py [model.gguf]
"""

import sys

import numpy as np
from ringlm import Model

model = Model(sys.argv[1]) if len(sys.argv) > 1 else Model.pull("smollm2-135m")
tokenizer = model.tokenizer
session = model.session(n_ctx=512)
print(f"K/V cache: {session.kv_nbytes:,} bytes for {session.n_ctx} tokens")

stream = tokenizer.stream()
logits = session.prefill(tokenizer.encode("The capital of France is"))
for _ in range(16):
    token = int(np.argmax(logits))
    if token in tokenizer.eog_ids:
        break
    print(stream.push(token), end="", flush=True)
    logits = session.decode(token)
print(stream.flush())
