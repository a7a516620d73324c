/** An app around `moa-core.js` in QuickJS or JavaScriptCore: requests, their results, and events. */

import type { Ort } from "../../src/index.js";
import { coreScript } from "./build.js";
import { JavaScriptCore } from "./jsc.js";
import { QuickJs, type Crossing } from "./quickjs.js";
import { StandIn, type Call } from "./stand_in.js";

/** The functions of `NativeHost` that only report, as lines of JavaScriptCore's shell. */
const LINES = `
const host = {};
const TOLD = ["startTimer", "stopTimer", "connect", "send", "close", "readFile", "readText", "writeText", "loadGraph", "releaseGraph",
  "closeCache", "putRows", "truncate", "step", "report"];
for (const name of TOLD) host[name] = (...given) => say(name, ...given);
let caches = 1 << 20;
host.now = () => preciseTime();
host.openCache = (graph) => (say("openCache", graph, ++caches), caches);
moa.start(host);
serve(moa);
`;

export interface AppOptions {
  readonly engine: "quickjs" | "jsc";
  readonly bundle: string;
  readonly texts: (key: string) => string;
  readonly ort: Ort | undefined;
  /** Takes the events of the answer of a request. */
  readonly onEvent: (request: number, event: { readonly event: string; readonly [key: string]: unknown }) => void;
  /** Whether to take the build for Hermes. */
  readonly hermes?: boolean;
}

/** An outcome or an event. */
interface Said {
  readonly request?: number;
  readonly event?: { readonly event: string };
  readonly result?: unknown;
  readonly error?: { readonly name: string; readonly message: string };
}

export class App {
  readonly host: StandIn;
  /** Bytes of the engine's values; undefined where that is not known. */
  memory: () => number | undefined = () => undefined;
  private readonly call: Call;
  private stop: () => Promise<void> = async () => undefined;
  private requests = 0;
  private readonly waiting = new Map<number, { resolve: (result: unknown) => void; reject: (error: Error) => void }>();

  private constructor(
    private readonly options: AppOptions,
    call: (app: App) => Call,
  ) {
    this.call = call(this);
    const { bundle, ort, texts } = options;
    this.host = new StandIn(bundle, texts, ort, this.call, (said) => this.hear(said as Said));
  }

  static async start(options: AppOptions): Promise<App> {
    const script = await coreScript(options.hermes);
    return options.engine === "quickjs" ? App.inQuickJs(options, script) : App.inJavaScriptCore(options, script);
  }

  /** Request something, and return its result. */
  request(name: string, given: object = {}): Promise<unknown> {
    const request = ++this.requests;
    return new Promise((resolve, reject) => {
      this.waiting.set(request, { resolve, reject });
      this.call("request", request, name, JSON.stringify(given));
    });
  }

  end(): Promise<void> {
    return this.stop();
  }

  private static async inQuickJs(options: AppOptions, script: string): Promise<App> {
    const engine = await QuickJs.create();
    // What the program reports comes between two calls, as from a native program's queue.
    const app = new App(options, () => (method, ...given) => void setImmediate(() => engine.call("moa", method, ...given)));
    engine.run(script, "moa-core.js");
    const host = app.host as unknown as { [name: string]: (...given: never[]) => Crossing };
    const names = Object.getOwnPropertyNames(StandIn.prototype).filter((name) => name !== "constructor" && name !== "answer");
    engine.define("host", Object.fromEntries(names.map((name) => [name, (...given: never[]) => host[name]!(...given)])));
    engine.run("moa.start(host);", "start.js");
    app.memory = () => engine.memory;
    return app;
  }

  private static async inJavaScriptCore(options: AppOptions, script: string): Promise<App> {
    let program: JavaScriptCore | undefined;
    const app = new App(options, () => (method, ...given) => program!.call(method, ...given));
    const host = app.host as unknown as { [name: string]: (...given: unknown[]) => void };
    program = new JavaScriptCore([script, LINES], (name, ...given) => host[name]!(...given));
    app.stop = async () => {
      program.end();
      await program.ended;
    };
    return app;
  }

  private hear({ request, event, result, error }: Said): void {
    if (request === undefined) return;
    if (event) return this.options.onEvent(request, event);
    const waiting = this.waiting.get(request);
    this.waiting.delete(request);
    if (error) waiting?.reject(Object.assign(new Error(error.message), { name: error.name }));
    else waiting?.resolve(result);
  }
}
