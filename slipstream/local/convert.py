"""Makes a bf16 checkpoint: `python -m slipstream.local.convert SOURCE TARGET`.

SOURCE is a GGUF file or a name on the Hugging Face hub. The only module here that loads torch; it runs in
a process of its own. Exit code 3: the hub cannot be reached.
"""

import sys
import warnings
from pathlib import Path


def main(source: str, target: str) -> int:
    """Returns the exit code."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    arguments: dict[str, object] = {"dtype": torch.bfloat16}
    where, tokenizer_arguments = source, {}
    if source.endswith(".gguf"):
        where, tokenizer_arguments = str(Path(source).parent), {"gguf_file": Path(source).name}
        arguments |= {**tokenizer_arguments, "quantization_config": GgufConfig(dequantize=True)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **tokenizer_arguments)
        model = AutoModelForCausalLM.from_pretrained(where, **arguments)
    except OSError as error:  # what transformers raises for the hub's troubles and unknown names alike
        print(str(error).splitlines()[0])
        return 3
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
