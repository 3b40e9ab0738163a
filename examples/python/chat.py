"""Two turns with the default model; the second one prefills only its own tokens."""

from ringlm import Model

with (
    Model.pull("smollm2-135m") as model,
    model.chat(system="You answer in one sentence.", temperature=0) as chat,
):
    for question in ("What is the capital of France?", "And of Italy?"):
        print(f"> {question}")
        for piece in chat.send(question):
            print(piece, end="", flush=True)
        usage = chat.last_usage
        print(f"\n  ({usage.prefill_tokens} tokens prefilled, {usage.cached_tokens} were in the cache)")
