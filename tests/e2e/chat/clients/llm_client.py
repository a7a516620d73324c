"""``llm``: see ``openai_client.py``. It cannot require a call of a tool, so it shows what a tool's result becomes."""

import json
import os
import sys
import tempfile
from pathlib import Path

folder = os.environ["LLM_USER_PATH"] = tempfile.mkdtemp()
able = "supports_schema: true, supports_tools: true"
entry = f"- {{model_id: target, model_name: target, api_base: {json.dumps(sys.argv[1])}, {able}}}\n"
Path(folder, "extra-openai-models.yaml").write_text(entry)

import llm  # noqa: E402
from asked import QUESTION, SCHEMA  # noqa: E402


def paint(colour: str) -> str:
    """Paint it."""
    return "done"


model = llm.get_model("target")
options = {"max_tokens": 64, "temperature": 0, "key": "unused"}
tools = model.prompt(QUESTION, tools=[paint], **options)
print(
    json.dumps(
        {
            "plain": model.prompt(QUESTION, stream=False, **options).text(),
            "stream": "".join(model.prompt(QUESTION, **options)),
            "object": json.loads(model.prompt(QUESTION, schema=SCHEMA, stream=False, **options).text()),
            "final": tools.text(),
        }
    )
)
