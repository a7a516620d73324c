/** The program of an engine that measures what the core adds to the steps of a graph: it stands in for a graph that takes no time. */

import "../../src/text_encoding.js";

import { ChatTokenizer, MoaDrafter, NgramMixture, budgetOf, type Graph, type GraphCache, type StepInputs, type StepResult } from "../../src/index.js";

const CANDIDATES = 8;
const HEADS = { kvHeads: 3, headDim: 64 };
const STEPS = 6; // of a draft
const DRAFTS = 20;

/** Functions of the program, and the files of a bundle, which a script before defines. */
const { now, report, files } = globalThis as unknown as {
  now(): number;
  report(json: string): void;
  readonly files: { readonly tokenizer: string; readonly template: string; readonly special: { readonly [name: string]: string } };
};

class NoTime implements Graph {
  readonly rowShape = HEADS;

  open(): GraphCache {
    return { putRows: () => undefined, truncate: () => undefined, step: (inputs) => this.step(inputs), close: () => undefined };
  }

  async release(): Promise<void> {}

  private async step({ tokens, queries }: StepInputs): Promise<StepResult> {
    const count = queries.length * CANDIDATES;
    const last = tokens[tokens.length - 1]!;
    return {
      tokens: Int32Array.from({ length: count }, (_, at) => 100 + ((last * 31 + at * 7) % 1000)),
      logprobs: Float32Array.from({ length: count }, (_, at) => -0.4 - (at % CANDIDATES)),
    };
  }
}

/** Return the median duration of a drafting step at this context length, in milliseconds. */
async function stepMs(context: number, tree: boolean): Promise<number> {
  const drafter = new MoaDrafter(new NoTime(), { maxContext: 8192, mixture: new NgramMixture([0]) });
  const text = Array.from({ length: context }, (_, at) => 100 + ((at * at) % 997));
  const budget = tree ? budgetOf(16, STEPS, { width: 4, branches: true }) : budgetOf(STEPS, STEPS);
  await drafter.propose(text, budget);
  const times: number[] = [];
  for (let draft = 0; draft < DRAFTS; draft++) {
    text.push(200 + draft);
    const began = now();
    const { steps } = await drafter.propose(text, budget);
    times.push((1000 * (now() - began)) / Math.max(1, steps.length));
  }
  return times.sort((a, b) => a - b)[DRAFTS / 2]!;
}

async function measure(): Promise<object> {
  const began = now();
  const tokenizer = new ChatTokenizer(JSON.parse(files.tokenizer), files.template, files.special, []);
  const read = now();
  const tokens = tokenizer.encodeChat([{ role: "user", content: "Name three primary colours, and say why these three. ".repeat(8) }]);
  const encoded = now();
  return {
    tokenizer_ms: 1000 * (read - began),
    encode_ms: 1000 * (encoded - read),
    encoded: tokens.length,
    chain_ms: { 100: await stepMs(100, false), 1000: await stepMs(1000, false), 4000: await stepMs(4000, false) },
    tree_ms: { 1000: await stepMs(1000, true) },
  };
}

void measure().then((measured) => report(JSON.stringify(measured)));
