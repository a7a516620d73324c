/** Replays a trace of a drafting loop and names the first difference from Python. */

import assert from "node:assert/strict";

import type { JsonValue } from "@bufbuild/protobuf";

import { ClientSession, CostModel, DraftingLoop, FixedShape, RowsMismatchError, budgetOf, digest } from "../src/index.js";
import type {
  Conditions,
  Controller,
  Draft,
  DraftTree,
  Drafter,
  Fingerprints,
  LoopEvent,
  LoopSettings,
  StoppingRule,
  KvArray,
  Offline,
  Policy,
  Wait,
} from "../src/index.js";
import { asMessage, bytesOf, eventOf, said } from "./trace_json.js";
import { alike, ours, plain, type Value } from "./vectors.js";

type Said = { [key: string]: Value };
type Step = Said & { call: string; args: Said };

export interface LoopTrace {
  readonly name: string;
  readonly steps: Step[];
}

/** @throws AssertionError with the trace, the step, and what differs. */
export function replayLoop(trace: LoopTrace): void {
  const [created, ...steps] = trace.steps;
  const played = new PlayedLoop(created!.args);
  let state: Value = {};
  steps.forEach(({ call, args, ...expected }, number) => {
    const came = played.do(call, args);
    state = expected["state"] ?? state;
    if (expected["frames"]) expected["frames"] = (expected["frames"] as JsonValue[]).map(asMessage) as Value;
    const whole = { ...expected, state };
    if (!alike(came, whole)) assert.deepEqual(came, whole, `${trace.name}, step ${number + 1}, ${call}`);
  });
}

/** Replaces a drafter: records its calls. The trace contains the drafts. */
class StandIn implements Drafter {
  rows = 0;
  readonly needsRows: boolean;
  readonly stoppingRule: StoppingRule | null;
  told: Value[] = [];
  private readonly headDim: number;

  constructor(said: Said) {
    this.needsRows = said["needs_rows"] as boolean;
    this.stoppingRule = ours<StoppingRule | null>(said["manners"]!);
    this.headDim = said["head_dim"] as number;
  }

  addRows(start: number, keys: KvArray): void {
    this.told.push(["add_rows", start, keys.count]);
    if (keys.headDim !== this.headDim) {
      throw new RowsMismatchError(`rows of ${keys.headDim} numbers, not ${this.headDim}`);
    }
    this.rows = start + keys.count;
  }

  truncateRows(length: number): void {
    this.told.push(["truncate_rows", length]);
    this.rows = Math.min(this.rows, length);
  }

  propose(): never {
    throw new Error("the trace contains the drafts");
  }
}

class PlayedLoop {
  private readonly loop: DraftingLoop<StandIn>;
  private readonly drafter: StandIn | undefined;
  private readonly writer: StandIn | undefined;
  private events: LoopEvent[] = [];
  private todo: Draft<StandIn> | Wait | undefined;

  constructor(args: Said) {
    const session = new ClientSession(args["fingerprints"] as unknown as Fingerprints, {
      stopTokens: args["stop_tokens"] as number[],
      policy: args["policy"] as Policy,
      rowEncoding: args["row_encoding"] as number,
      vocabSize: args["vocab_size"] as number,
    });
    this.drafter = args["drafter"] ? new StandIn(args["drafter"] as Said) : undefined;
    this.writer = args["writer"] ? new StandIn(args["writer"] as Said) : undefined;
    const settings = ours<LoopSettings>(args["settings"]!);
    const controller = controllerOf(args["controller"] as Said);
    this.loop = new DraftingLoop(session, this.drafter, controller, settings, this.writer);
    this.loop.listen((event) => this.events.push(event));
  }

  /** Make a call; return its result as the fields of a step. */
  do(call: string, args: Said): Said {
    this.events = [];
    const came: Said = {};
    try {
      const result = this.call(call, args);
      if (call === "next") came["todo"] = this.said(result as Draft<StandIn> | Wait);
      else if (call === "frames_to_send") came["frames"] = (result as Uint8Array[]).map(said) as Value;
      else if (result !== undefined) came["returns"] = result as Value;
    } catch (error) {
      came["raises"] = (error as Error).message;
    }
    if (this.events.length) came["events"] = this.events.map(eventOf);
    for (const name of ["drafter", "writer"] as const) {
      const who = this[name];
      if (who?.told.length) came[name] = who.told;
      if (who) who.told = [];
    }
    const { answering, committed, unconfirmed } = this.loop;
    came["state"] = { answering, committed: committed.length, unconfirmed };
    return came;
  }

  private call(call: string, args: Said): unknown {
    const { loop } = this;
    const now = args["now"] as number;
    const tokens = args["tokens"] as number[];
    switch (call) {
      case "ask": {
        const regex = args["regex"] as string | undefined;
        const grammar = regex === undefined ? undefined : ({ kind: "regex", text: regex } as const);
        const seed = BigInt(args["seed"] as string);
        const sampling = { temperature: 0, topP: 1, seed, topK: 0, minP: 0, ...(grammar ? { grammar } : {}) };
        const options = { whileAway: args["while_away"] as boolean, draft: args["draft"] as number[] };
        return loop.ask(args["kept"] as number, tokens, sampling, args["max_new_tokens"] as number, options);
      }
      case "cancel":
        return loop.cancel();
      case "may_keep":
        return loop.mayKeep(args["start"] as number, tokens);
      case "keep":
        return loop.keep(args["start"] as number, tokens);
      case "connecting":
        return loop.connecting();
      case "opened":
        return loop.opened();
      case "lost":
        return loop.lost(args["why"] as string, args["retry_in_s"] as number, now, args["on_purpose"] as boolean);
      case "received":
        return loop.received(bytesOf(args["frame"] as { bytes?: string }), now);
      case "next":
        return loop.next(now);
      case "drafted": {
        const tree = args["tree"] as unknown as DraftTree;
        return loop.drafted(this.todo as Draft<StandIn>, tree, args["seconds"] as number);
      }
      case "frames_to_send":
        return loop.framesToSend(now);
      case "resend":
        return loop.resend();
      case "set_conditions":
        loop.conditions = ours<Conditions>(args["value"]!);
        return undefined;
      case "set_policy":
        loop.policy = args["value"] as Policy;
        return undefined;
      case "set_offline":
        loop.offline = args["value"] as Offline;
        return undefined;
      default:
        throw new Error(`the trace calls ${call}`);
    }
  }

  private said(todo: Draft<StandIn> | Wait): Value {
    this.todo = todo;
    if (todo.todo === "wait") return { wait: todo.until };
    const by = todo.by === this.writer ? "writer" : "drafter";
    const prefix = { length: todo.prefix.length, digest: digest(todo.prefix) };
    return { draft: { by, prefix, budget: plain(todo.budget), origin: todo.origin } };
  }
}

function controllerOf(said: Said): Controller {
  const { nodes, levels, width, kind } = said as { nodes: number; levels: number; width: number; kind: string };
  if (kind === "throughput") return new CostModel(nodes, levels, width);
  const shape = budgetOf(nodes, levels, { width, branches: said["branches"] as boolean });
  return new FixedShape(shape, said["lookahead"] as number);
}
