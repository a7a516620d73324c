/** A verifier whose target writes by position alone: `choice(position)`. One conversation, and chains. */

import { create, fromBinary, toBinary, type MessageInitShape } from "@bufbuild/protobuf";

import { digest, wire } from "../src/index.js";
import type { FakeHost, FakeSocket } from "./fake_host.js";

type ServerEvent = NonNullable<MessageInitShape<typeof wire.ServerMessageSchema>["event"]>;

/** What the target chooses for this position: a text without repetitions to copy from. */
export function choice(position: number): number {
  return 259 + ((position * 37) % 211);
}

export class ToyVerifier {
  /** What it has of the conversation. */
  tokens: number[] = [];
  /** Hellos that came. */
  readonly hellos: wire.Hello[] = [];
  /** Prompts that came. */
  readonly prompts: wire.Prompt[] = [];
  /** What it says that it can. */
  capabilities: wire.Capability[] = [];
  /** Whether frames are answered; else they are lost. */
  answers = true;
  private epoch = 0n;
  private maxLength = 0;

  /** Opens each socket of the host, and answers what comes on it. */
  constructor(host: FakeHost) {
    host.onsocket = (socket) => {
      socket.onsent = (frame) => this.answers && host.later(0.01, () => this.take(socket, frame));
      socket.opens();
    };
  }

  private take(socket: FakeSocket, frame: Uint8Array): void {
    const { event } = fromBinary(wire.ClientMessageSchema, frame);
    switch (event.case) {
      case "hello":
        this.greet(socket, event.value);
        break;
      case "prompt": {
        this.prompts.push(event.value);
        const { baseLen, epoch, maxLength, tokens } = event.value;
        this.tokens = [...this.tokens.slice(0, Number(baseLen)), ...tokens];
        this.epoch = epoch;
        this.maxLength = Number(maxLength);
        this.decide(socket, []);
        break;
      }
      case "draft":
        if (Number(event.value.baseLen) < this.tokens.length) this.say(socket, this.tokens.slice(Number(event.value.baseLen)), 0);
        else this.decide(socket, event.value.tokens);
        break;
      case "cancel":
        this.epoch = event.value.epoch;
        this.tokens.length = Math.min(this.tokens.length, Number(event.value.baseLen));
        break;
      case "ping":
        send(socket, { case: "pong", value: {} });
        break;
      default:
    }
  }

  private greet(socket: FakeSocket, hello: wire.Hello): void {
    this.hellos.push(hello);
    const known = hello.resume!.marks.filter(
      ({ digest: told, length }) => digest(this.tokens.slice(0, Number(length))) === told && Number(length) <= this.tokens.length,
    );
    const committedLength = known.at(-1)?.length ?? 0n;
    const { epoch } = this;
    const verdictFollows = Number(committedLength) < this.tokens.length && hello.resume!.epoch === epoch;
    const limits = { maxContext: 512, maxDraftTokens: 16, maxFrameBytes: 1 << 20, idleSeconds: 900, chainsOnly: true };
    const { capabilities } = this;
    const state = { limits, committedLength, epoch, verdictFollows, capabilities, dtype: "int4" };
    const value = { protocolVersion: 2, resumeToken: "a token", ...state };
    send(socket, { case: "welcome", value });
    if (verdictFollows) this.say(socket, this.tokens.slice(Number(committedLength)), 0);
  }

  /** Take of a draft what the target would have written, and one token of its own. */
  private decide(socket: FakeSocket, draft: readonly number[]): void {
    const base = this.tokens.length;
    const right = draft.findIndex((token, at) => token !== choice(base + at));
    const accepted = right < 0 ? draft.length : right;
    for (let count = 0; count <= accepted && this.tokens.length < (this.maxLength || 512); count++) {
      this.tokens.push(choice(this.tokens.length));
    }
    this.say(socket, this.tokens.slice(base), Math.min(accepted, this.tokens.length - base));
  }

  private say(socket: FakeSocket, tokens: number[], accepted: number): void {
    const finish = this.tokens.length === this.maxLength ? wire.Finish.LENGTH : wire.Finish.UNSPECIFIED;
    const baseLen = BigInt(this.tokens.length - tokens.length);
    send(socket, { case: "verdict", value: { epoch: this.epoch, baseLen, tokens, accepted, finish } });
  }
}

export function send(socket: FakeSocket, event: ServerEvent): void {
  socket.says(toBinary(wire.ServerMessageSchema, create(wire.ServerMessageSchema, { event })));
}
