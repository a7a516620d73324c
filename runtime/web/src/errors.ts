/** Errors that every program shows as a sentence. */

/** An error that a user can cause and mend. Its message tells what is wrong, what was expected and what to do. */
export class MoaError extends Error {
  override readonly name: string = "MoaError";
}

/** An answer cannot be written: the verifier refused it, or the conversation does not fit. */
export class ChatError extends MoaError {
  override readonly name: string = "ChatError";
}

/** The conversation does not fit into the target's context. */
export class ContextFullError extends ChatError {
  override readonly name = "ContextFullError";
}

/** A stored chat is in use by another program, or cannot be read or written. */
export class StoreError extends MoaError {
  override readonly name = "StoreError";
}

/** The verifier cannot be reached or refuses the connection. */
export class ConnectError extends MoaError {
  override readonly name = "ConnectError";

  /** @param final trying again with the same settings cannot help. */
  constructor(
    text: string,
    readonly final: boolean,
    options?: { readonly cause: unknown },
  ) {
    super(text, options);
  }
}
