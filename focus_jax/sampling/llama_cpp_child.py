"""The process in which llama.cpp's server runs; started by `LlamaCppSampler`, by path, so that nothing else is imported.

Reads its settings from the first argument (JSON), prints one line with its address, and goes when its parent goes:
when its standard input ends or it is handed to another parent.
"""

import json
import os
import select
import sys
import threading
from typing import Any

import xllamacpp


def watch(parent: int) -> None:
    """End this process as soon as the parent has gone, however it went."""
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], 0.5)
        if readable and not os.read(sys.stdin.fileno(), 1024):
            break
    os._exit(0)


def serve(settings: dict[str, Any]) -> xllamacpp.Server:
    """A running server; its HTTP threads are C++ and live as long as the object."""
    params = xllamacpp.CommonParams()
    params.model.path = settings["model_path"]
    params.model_alias = {settings["model"]}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = settings["num_parallel"]
    params.n_ctx = settings["context_length"] * settings["num_parallel"]
    params.cpuparams.n_threads = settings["num_threads"]
    params.cpuparams_batch.n_threads = settings["num_threads"]
    params.n_threads_http = settings["num_http_threads"]
    params.cache_ram_mib = settings["prompt_cache_mib"]
    if settings["exact_attention"]:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.fit_params = False  # it would shrink the context silently
    params.warmup = False
    params.ui = False
    params.endpoint_slots = False
    params.verbosity = 1  # errors
    return xllamacpp.Server(params)


if __name__ == "__main__":
    start = json.loads(sys.argv[1])
    threading.Thread(target=watch, args=(start["parent"],), daemon=True).start()
    try:
        server = serve(start)
    except RuntimeError as error:
        sys.exit(str(error))  # llama.cpp has said more on standard error
    print(json.dumps({"address": server.listening_address}), flush=True)
    threading.Event().wait()
