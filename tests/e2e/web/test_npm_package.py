"""The npm package: packed, and installed in an empty project."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from moa_export.targets.web import WebEngine
from moa_runtime.session.events import Sampling
from moa_server.offered_bundles import OfferedBundles
from moa_server.settings import Settings
from support.server.running import serving
from support.system.asking import QUESTION, TIMEOUT_S
from support.web.typescript import target_writes

#: A program with the package alone, the engine and a WebSocket for old Nodes.
_NODE_CHAT = """\
import { Bundle, Chat, loadModels } from "@moa-edge/runtime";
import { FolderStore, nodeHost } from "@moa-edge/runtime/node";

const { WebSocket } = await import(process.env.WS);
const [url, question] = process.argv.slice(2);
const verifier = { url, token: "secret" };
const bundle = await Bundle.fetch(verifier, { store: new FolderStore("kept") });
const models = await loadModels(bundle, { ort: await import(process.env.ORT) });
const chat = await Chat.connect(bundle, verifier, { ...models.forConversation(), host: nodeHost(WebSocket) });
for await (const event of chat.send(question, { maxNewTokens: 24 })) {
  if (event.event === "AnswerFinished") console.log(event.text);
}
await chat.close();
await models.close();
"""


def test_the_npm_package_chats_from_an_empty_project(
    compiled: Path, web_engine_here: WebEngine, engine, web_bundle: Path, tmp_path: Path
) -> None:
    """Packed, installed, and given an address; the bundle comes from the verifier."""

    def npm(*command: str, folder: Path) -> str:
        done = subprocess.run(["npm", *command], cwd=folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    packed = npm("pack", "--silent", "--ignore-scripts", "--pack-destination", str(tmp_path), folder=compiled).strip()
    (project := tmp_path / "project").mkdir()
    (project / "package.json").write_text('{"type": "module"}')
    npm("install", "--silent", "--no-audit", "--no-fund", str(tmp_path / packed), folder=project)
    (project / "chat.js").write_text(_NODE_CHAT)
    offered = OfferedBundles.of([web_bundle], engine.fingerprints)
    with serving(engine, Settings(token="secret"), bundles=offered) as verifier:
        own = target_writes(web_bundle, verifier, 24, Sampling())
        environment = {**os.environ, "ORT": web_engine_here.module.with_name("ort.node.min.mjs").as_uri()}
        environment["WS"] = (compiled / "node_modules" / "ws" / "wrapper.mjs").as_uri()
        command = ["node", "chat.js", f"ws://127.0.0.1:{verifier.port}", QUESTION]
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == own + "\n"
