/** Errors that every program shows as a sentence. */

/** Something a user can cause and mend: what was wrong, what was expected, what to do. */
export class MoaError extends Error {
  override readonly name: string = "MoaError";
}

/** An answer that cannot go on: the verifier refused it, or the conversation does not fit. */
export class ChatError extends MoaError {
  override readonly name: string = "ChatError";
}

/** The conversation does not fit into the target's context. */
export class ContextFullError extends ChatError {
  override readonly name = "ContextFullError";
}

/** A stored chat that another program has, or that cannot be read or written. */
export class StoreError extends MoaError {
  override readonly name = "StoreError";
}
