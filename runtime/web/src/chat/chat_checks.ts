/** Answers that were written without the target are checked when it is back. */

import { MoaError } from "../errors.js";
import type { ChatEvent } from "../events.js";
import type { Message } from "../text/chat_tokenizer.js";
import { AnswerStream, type Follower } from "./answer_stream.js";
import { ChatAnswers } from "./chat_answers.js";
import { isAnswer, type Unconfirmed } from "./unconfirmed.js";

/** A chat's unconfirmed turns. `Chat` is the class to use. */
export class ChatChecks extends ChatAnswers {
  /**
   * The answers among `messages` that {@link check} has something to do for, in order: written without the verifier, and
   * then left, by the user or since there was nothing more to write.
   */
  get unconfirmed(): readonly Unconfirmed[] {
    return [...this.turns.marks];
  }

  /**
   * Have the verifier check the first of {@link unconfirmed}: what the device wrote there is the draft of the answer, and
   * what the target would have written otherwise takes its place.
   *
   * The turns behind it stay. Where the answer changed, theirs are answers to another conversation: they are unconfirmed
   * from then on. Leaving the iteration early changes nothing. One that the verifier refuses stays as the device wrote it,
   * and is no longer unconfirmed. Events that are followed later are of what is the first then.
   *
   * @returns the answer's events, like those of `send`; undefined where all is confirmed, or without a verifier.
   * @throws ChatError an answer is being written, or `pending`.
   */
  check(): AnswerStream | undefined {
    this.checkIdle();
    this.checkComplete();
    if (!this.conversation.unconfirmed.length || this.status !== "online") return undefined;
    return new AnswerStream((follower) => this.checked(follower));
  }

  private async *checked(follower: Follower): AsyncGenerator<ChatEvent, void, undefined> {
    this.checkIdle();
    this.checkComplete();
    const { conversation, loop, session } = this;
    const { messages, unconfirmed } = conversation;
    let marks = unconfirmed;
    const mark = marks[0];
    if (!mark) return;
    const written = messages[mark.turn]!.content;
    conversation.restore(messages.slice(0, mark.turn - 1));
    this.checking = { messages, marks };
    let finished = false;
    try {
      const question = conversation.ask(loop.committed, messages[mark.turn - 1]!.content);
      const draft = this.tokenizer.encode(written);
      const most = Math.min(mark.most, session.limits.maxContext);
      const ask = (): void => loop.ask(question.kept, question.supplied, mark.sampling, most, { draft });
      for await (const event of this.ask(follower, question, ask)) {
        if (event.event === "AnswerFinished") {
          conversation.add(messages, this.left(marks, mark, messages, event.text !== written));
          this.record.disputed = this.checking = undefined;
          finished = true;
          void this.keeper.save();
        }
        yield event;
      }
    } catch (error) {
      // Refused for good, as where the target's context has no room for it: asking again would not help.
      if (error instanceof MoaError && this.status === "online") marks = marks.slice(1);
      throw error;
    } finally {
      this.checking = this.record.disputed = undefined;
      if (!finished) {
        conversation.restore(messages, marks);
        this.keeper.touch();
      }
    }
  }

  /**
   * The marks behind a turn that was checked. Of an answer that had none nobody knows how long it may become: at least as
   * long as it was.
   */
  private left(
    marks: readonly Unconfirmed[],
    checked: Unconfirmed,
    turns: readonly Message[],
    changed: boolean,
  ): Unconfirmed[] {
    const known = marks.filter(({ turn }) => turn > checked.turn);
    if (!changed) return known;
    const left: Unconfirmed[] = [];
    for (let turn = checked.turn + 1; turn < turns.length; turn++) {
      const mark = known.find((each) => each.turn === turn);
      if (mark) {
        left.push(mark);
      } else if (isAnswer(turns, turn)) {
        const length = this.tokenizer.encode(turns[turn]!.content).length + 1; // its end too
        left.push({ turn, sampling: checked.sampling, most: checked.most ? Math.max(checked.most, length) : 0 });
      }
    }
    return left;
  }
}
