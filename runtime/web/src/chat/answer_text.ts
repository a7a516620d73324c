/** The text of an answer whose tokens are confirmed, replaced and taken back while it is shown. */

import type { TextSpan, TokenOrigin } from "../events.js";
import type { ChatTokenizer } from "../text/chat_tokenizer.js";
import { TextStream } from "../text/text_stream.js";
import { commonLength } from "../tokens.js";

interface Run {
  readonly end: number; // behind its last token
  readonly span: TextSpan;
}

/**
 * Decodes only what changed since the call before: after {@link show} of the tokens of "Paris is nice", one of "Paris is
 * big" decodes one token and returns the dropped " nice".
 */
export class AnswerText {
  private readonly stream: TextStream;
  private tokens: TokenOrigin[] = [];
  private pieces: string[] = [];
  private settled = 0; // tokens that are the same as when the runs were made
  private runs: Run[] = [];

  constructor(tokenizer: ChatTokenizer) {
    this.stream = new TextStream(tokenizer);
  }

  /**
   * Take the answer's tokens as they stand; returns the text of those that are no longer there.
   *
   * @param settled how many of them, at the beginning, are known to be the same as at the call before.
   */
  show(tokens: readonly TokenOrigin[], settled = 0): string {
    const before = this.tokens.slice(settled).map(({ token }) => token);
    const now = tokens.slice(settled);
    const common = settled + commonLength(before, now.map(({ token }) => token));
    const dropped = this.pieces.slice(common).join("");
    this.stream.truncate(common);
    this.pieces.length = common;
    for (const { token } of tokens.slice(common)) this.pieces.push(this.stream.push(token));
    this.tokens.length = settled;
    for (const each of now) this.tokens.push(each);
    this.settled = Math.min(this.settled, settled);
    return dropped;
  }

  /**
   * The text, one span for each run of tokens of one origin and confirmation.
   *
   * @param complete no more tokens follow: an unfinished character at the end then becomes a replacement character, and is
   *   left out otherwise.
   */
  spans(complete = false): TextSpan[] {
    // A run that ends where the settled tokens do may go on behind them.
    while (this.runs.length && (complete || this.runs.at(-1)!.end >= this.settled)) this.runs.pop();
    let end = this.runs.at(-1)?.end ?? 0;
    while (end < this.tokens.length) {
      const { committed, origin } = this.tokens[end]!;
      let text = "";
      for (let next = this.tokens[end]; next?.origin === origin && next.committed === committed; next = this.tokens[end]) {
        text += this.pieces[end++]!;
      }
      if (complete && end === this.tokens.length) text += this.stream.finish();
      this.runs.push({ end, span: { text, origin, committed } });
    }
    this.settled = end;
    return this.runs.map(({ span }) => span).filter(({ text }) => text);
  }

  /** Text of the first `count` tokens. */
  before(count: number): string {
    return this.pieces.slice(0, count).join("");
  }
}

/**
 * The word at the end of a text that one of its continuations goes on with: of "in every col" with "ours" or "umn" it is
 * "col", of "in every column" with " of it" and " and row" none.
 */
export function sharedWord(before: string, ...versions: string[]): string {
  const goesOn = versions.some((version) => /^\S/u.test(version));
  return goesOn ? /\S*$/u.exec(before)![0] : "";
}
