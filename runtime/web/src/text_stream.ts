/** Decoding of texts that grow token by token. */

import type { ChatTokenizer } from "./chat_tokenizer.js";
import { NO_CONTROL, type ControlState } from "./reasoning.js";

const REPLACEMENTS = /\ufffd+$/;
/** Longer runs of replacement characters are invalid output of the model, not an unfinished character. */
const NOISE = 8;

interface State {
  readonly window: number;
  readonly anchor: number;
  readonly emitted: number;
  readonly control: ControlState;
}

/**
 * Turn a growing list of tokens into text, piece by piece, without ever emitting half a character. A character whose UTF-8
 * bytes are spread over two tokens comes out with the second: the tokens `Caf`, `0xC3`, `0xA9` give `Caf`, ``, `é`.
 */
export class TextStream {
  private tokens: number[] = [];
  // The text up to token `anchor` was emitted. Decoding starts at `window` before it, because decoders treat the first token's
  // leading space specially, and not at 0, which would take quadratic time.
  private state: State = { window: 0, anchor: 0, emitted: 0, control: NO_CONTROL }; // `emitted` characters after the anchor were emitted, too
  private states: State[] = []; // before each token

  constructor(private readonly tokenizer: Pick<ChatTokenizer, "decode" | "controlTokens">) {}

  /** Add one token; return the text that is certain now, perhaps none. */
  push(token: number): string {
    this.states.push(this.state);
    const [control, instead] = this.tokenizer.controlTokens.step(this.state.control, token);
    if (instead !== undefined) {
      const piece = this.finish() + instead;
      const end = this.tokens.push(token);
      this.state = { window: end, anchor: end, emitted: 0, control };
      return piece;
    }
    this.tokens.push(token);
    const pending = this.pending();
    const { window, anchor, emitted } = this.state;
    const whole = pending.replace(REPLACEMENTS, "");
    const unfinished = pending.length - whole.length;
    if (unfinished > 0 && unfinished <= NOISE) {
      const piece = whole.slice(emitted);
      this.state = { window, anchor, emitted: emitted + piece.length, control };
      return piece;
    }
    this.state = { window: anchor, anchor: this.tokens.length, emitted: 0, control };
    return pending.slice(emitted);
  }

  /** Return the text held back; an unfinished character becomes a replacement character. */
  finish(): string {
    return this.pending().slice(this.state.emitted);
  }

  /** Forget all but the first `count` tokens. */
  truncate(count: number): void {
    if (count >= this.tokens.length) return;
    this.state = this.states[count]!;
    this.tokens.length = this.states.length = count;
  }

  private pending(): string {
    const { window, anchor } = this.state;
    const known = this.tokenizer.decode(this.tokens.slice(window, anchor));
    return this.tokenizer.decode(this.tokens.slice(window)).slice(known.length);
  }
}
