/**
 * A device in a process of its own, for programs that have its verifier: `node device_program.js BUNDLE ORT LEVELS NODES`.
 * It is told {"ask": tokens, "most": tokens of the answer}, says {"frames": [...]} and is told those that answer them, all in
 * base64, one JSON object a line; in the end it says {"answer": tokens, "rounds": drafts that were judged}. `ORT` is a module
 * of onnxruntime-web; drafts are trees of this number of nodes; with 0, chains.
 */

import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

import { USUAL_SETTINGS } from "../src/drafting/settings.js";
import { ClientSession, DraftingLoop, FixedShape, GREEDY, budgetOf, loadModels, type LoopEvent, type Ort } from "../src/index.js";
import { openBundle } from "../src/node/index.js";

const WIDTH = 8; // nodes that a step of a tree continues

const [folder, ortPath, levels, nodes] = process.argv.slice(2) as [string, string, string, string];
const module = (await import(pathToFileURL(ortPath).href)) as { default?: Ort } & Ort;
const ort = module.default ?? module;
ort.env.wasm.numThreads = 1;
const bundle = await openBundle(folder);
const models = await loadModels(bundle, { ort });
const shape = Number(nodes)
  ? budgetOf(Number(nodes), Number(levels), { width: WIDTH, branches: true })
  : budgetOf(1024, Number(levels));

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const now = (): number => performance.now() / 1000;

interface Told {
  readonly fresh?: boolean;
  readonly ask?: number[];
  readonly most?: number;
  readonly frames?: string[];
}

async function told(): Promise<Told | undefined> {
  const { value, done } = await lines.next();
  return done ? undefined : (JSON.parse(value as string) as Told);
}

class Device {
  answer: number[] = [];
  rounds = 0;
  private judged = false;
  private readonly loop: DraftingLoop;

  constructor() {
    const { fingerprints, stopTokens } = bundle.manifest;
    const session = new ClientSession(fingerprints, { stopTokens });
    const settings = { ...USUAL_SETTINGS, drafting: "device" } as const;
    this.loop = new DraftingLoop(session, models.forConversation().drafter, new FixedShape(shape), settings);
    this.loop.listen((event) => this.hear(event));
    this.loop.opened();
  }

  async ask(tokens: number[], most: number): Promise<void> {
    this.answer = [];
    this.rounds = 0;
    await this.exchange();
    this.loop.ask(this.loop.committed.length, tokens, GREEDY, most);
    await this.exchange();
    while (this.loop.answering) {
      const todo = this.loop.next(now());
      if (todo.todo === "draft") {
        const tree = await todo.by.propose(todo.prefix, todo.budget, todo.sampling);
        this.loop.drafted(todo, tree, 0);
      }
      if (!(await this.exchange())) throw new Error("an answer runs, and there is nothing to send");
    }
  }

  /** Whether there was something to send. */
  private async exchange(): Promise<boolean> {
    const frames = this.loop.framesToSend(now());
    if (!frames.length) return false;
    console.log(JSON.stringify({ frames: frames.map((frame) => Buffer.from(frame).toString("base64")) }));
    for (const frame of (await told())!.frames!) this.loop.received(new Uint8Array(Buffer.from(frame, "base64")), now());
    return true;
  }

  private hear(event: LoopEvent): void {
    if (event.event === "RoundEnded") this.judged = event.supplied === 0;
    else if (event.event === "Committed") {
      this.answer.push(...event.tokens);
      if (this.judged) this.rounds++;
    } else if (event.event === "Faulted") throw new Error(event.text);
  }
}

let device = new Device();
for (let todo = await told(); todo; todo = await told()) {
  if (todo.fresh) device = new Device();
  await device.ask(todo.ask!, todo.most!);
  console.log(JSON.stringify({ answer: device.answer, rounds: device.rounds }));
}
