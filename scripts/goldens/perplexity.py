"""Make tests/goldens/models/smollm2.json: perplexity of the real SmolLM2-135M on a fixed text, by transformers.

    python scripts/goldens/perplexity.py DIRECTORY_OF_THE_GGUF

needs torch, transformers and gguf. transformers' own reading of the .gguf is independent of this project's.
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder: its peft.py would hide the package

import torch  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = (
    "The lighthouse keeper had counted 1,482 ships in the winter of 1907, and he wrote each of them down. "
    "Most carried coal or timber; a few carried oranges, which he could smell before he saw the mast. "
    "When the company replaced his lamp with an electric one, he asked whether he might keep the old lens. "
    "They told him that it weighed nearly three tons. He said that he knew, because he had cleaned it every "
    "morning for 26 years, and that he only wanted to know where it would go. In the end it went to a museum "
    "in the city, where children pressed their noses against the glass and saw themselves upside down.\n\n"
    "Photosynthesis is the process by which plants, algae and some bacteria turn light into chemical energy. "
    "Water and carbon dioxide are taken up, oxygen is released, and sugars are built that feed the organism. "
    "Nearly all life on Earth depends on it, directly or indirectly.\n"
)


def main(directory: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=FILE)
    # transformers drops SmolLM2's digit splitting when it builds the tokenizer from a .gguf file
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "What is 12 + 7?"}], tokenize=False)
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=FILE, dtype=torch.float32).eval()
    with torch.no_grad():
        loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss.item()
    golden = {"text": TEXT, "ids": ids, "perplexity": math.exp(loss), "chat": chat}
    out = ROOT / "tests" / "goldens" / "models" / "smollm2.json"
    out.write_text(json.dumps(golden, indent=1) + "\n")
    print(len(ids), "tokens, perplexity", golden["perplexity"])


if __name__ == "__main__":
    main(sys.argv[1])
