/**
 * The boundary between `moa-core.js` and a program in Swift, Kotlin or another language: the functions that the program defines
 * ({@link NativeHost}) and those that it calls ({@link NativeCore}).
 *
 * Only numbers, texts and bytes cross, so that any binding of JavaScriptCore, QuickJS or Hermes will do: no promises, callbacks or
 * objects. Bytes are a `Uint8Array` in both directions; the program may also give an `ArrayBuffer` or `Int8Array`. Arrays of numbers
 * in bytes have 4 bytes a number, little-endian. Everything happens in one thread. The program may call the core from within its
 * functions; what follows is done after the present call. After each call a program with QuickJS runs the engine's pending jobs.
 */

/**
 * The functions that the program defines, as properties of the object that it hands to `moa.start`.
 *
 * A function with a `call` returns nothing: its outcome is reported by `moa.answered(call, value)` or `moa.failed(call, reason)`,
 * from any thread that may enter the engine, at once or later.
 */
export interface NativeHost {
  /** Return seconds of a clock that only goes forward. */
  now(): number;

  /** Call `moa.fired(timer)` once, after `seconds`. A timer of 0 seconds lets waiting events run first. */
  startTimer(timer: number, seconds: number): void;

  /** Forget a timer, which may have fired. */
  stopTimer(timer: number): void;

  /**
   * Open a WebSocket, and report by `moa.opened`, `moa.received` and `moa.closed`.
   *
   * @param socket its number from now on.
   * @param protocols subprotocols to offer, with commas between them; empty for none.
   */
  connect(socket: number, url: string, protocols: string): void;

  /** Send a binary frame; it may be dropped if the socket is not open. */
  send(socket: number, frame: Uint8Array): void;

  /** Close a socket with code 1000; no `moa.closed` need follow. */
  close(socket: number): void;

  /** Read a file of the bundle, such as `tokenizer.json`; the answer is its bytes. */
  readFile(call: number, file: string): void;

  /** Load a graph of the bundle, such as `device_half.mlpackage`; the answer is a number for it. */
  loadGraph(call: number, file: string): void;

  /** Free a graph. */
  releaseGraph(graph: number): void;

  /** Return the number of new, empty caches for one conversation: of keys and values of tokens, and of memory rows. */
  openCache(graph: number): number;

  /** Free caches. */
  closeCache(cache: number): void;

  /**
   * Put memory rows at position `start`, in place of those held from there on. Only for graphs with memory rows.
   *
   * @param start at most the number of rows held.
   * @param keys and `values`: float32 `[n, heads, head_dim]`.
   */
  putRows(cache: number, start: number, keys: Uint8Array, values: Uint8Array): void;

  /** Forget the keys and values of tokens from entry `length` on. Memory rows stay. */
  truncate(cache: number, length: number): void;

  /**
   * Run one step over `T` new tokens, after the `S` entries in the cache, and append their keys and values to it. Steps of one
   * cache do not overlap.
   *
   * The answer is bytes: for each of the `Q` queries the `K` likeliest next tokens, best first (int32 `[Q, K]`), and after all of
   * them the tokens' log-probabilities (float32 `[Q, K]`).
   *
   * @param tokens and `positions`: int32 `[T]`.
   * @param queries int32 `[Q]`, indices of the new tokens whose next token is predicted.
   * @param mask uint8 `[T, S + T]`, 1 if the token attends: cached entries first, then the new ones, itself included.
   * @param rows number of leading memory rows to attend to; 0 for graphs without them.
   */
  step(
    call: number,
    cache: number,
    tokens: Uint8Array,
    positions: Uint8Array,
    queries: Uint8Array,
    mask: Uint8Array,
    rows: number,
  ): void;

  /** Read a text of the app's store; the answer is the text, or null if there is none. */
  readText(call: number, key: string): void;

  /** Write a text to the app's store, wholly or not at all; the answer, of any value, comes when it is durable. */
  writeText(call: number, key: string, text: string): void;

  /** Take the outcome of a request, or an event of a chat, as JSON; see {@link NativeCore.request}. */
  report(json: string): void;
}

/** The global object `moa` that `moa-core.js` defines. */
export interface NativeCore {
  /** Begin. Call it once, before all else. */
  start(host: NativeHost): void;

  /**
   * Do something for the program, see `requests.ts`.
   *
   * The outcome is reported as `{"request": number, "result": ...}` or `{"request": number, "error": {"name", "message"}}`, and
   * events of its answer before it as `{"request": number, "event": {"event": "AnswerUpdate", ...}}`.
   * Changes of a link come at any time: `{"chat": number, "event": {"event": "LinkChanged", ...}}`.
   *
   * @param request a number that the program chooses.
   * @param name of what to do, such as `send`.
   * @param json its arguments, an object.
   */
  request(request: number, name: string, json: string): void;

  /** A timer's time has come. */
  fired(timer: number): void;

  /** A socket is open. */
  opened(socket: number): void;

  /** A socket received a binary frame. */
  received(socket: number, frame: Uint8Array | ArrayBuffer | Int8Array): void;

  /**
   * A socket is closed, or could not be opened.
   *
   * @param status HTTP status of the answer if the server refused to open it; 0 otherwise.
   */
  closed(socket: number, status: number): void;

  /** A call is done. */
  answered(call: number, value: unknown): void;

  /** A call failed, for this reason, in a few words. */
  failed(call: number, reason: string): void;
}
