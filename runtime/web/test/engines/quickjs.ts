/** QuickJS, as Android apps have it as a library; here compiled to WebAssembly. */

import variant from "@jitl/quickjs-wasmfile-release-sync";
import { newQuickJSWASMModuleFromVariant, type QuickJSContext, type QuickJSHandle, type QuickJSSyncVariant } from "quickjs-emscripten-core";

/** What crosses the boundary. */
export type Crossing = number | string | boolean | Uint8Array | null | undefined | void;

/** One engine with functions of the program, and nothing of a browser. */
export class QuickJs {
  private constructor(private readonly context: QuickJSContext) {}

  static async create(): Promise<QuickJs> {
    const module = await newQuickJSWASMModuleFromVariant(variant as unknown as QuickJSSyncVariant);
    return new QuickJs(module.newContext());
  }

  /** Run a script. */
  run(script: string, name: string): void {
    this.context.unwrapResult(this.context.evalCode(script, name)).dispose();
    this.pump();
  }

  /** Define a global object of functions. */
  define(name: string, functions: { readonly [name: string]: (...given: never[]) => Crossing }): void {
    const { context } = this;
    const object = context.newObject();
    for (const [key, action] of Object.entries(functions)) {
      const made = context.newFunction(key, (...handles) =>
        this.toEngine((action as (...given: unknown[]) => Crossing)(...handles.map((handle) => this.fromEngine(handle)))),
      );
      context.setProp(object, key, made);
      made.dispose();
    }
    context.setProp(context.global, name, object);
    object.dispose();
  }

  /** Call a method of a global object, and run what follows. */
  call(object: string, method: string, ...given: Crossing[]): void {
    const { context } = this;
    const target = context.getProp(context.global, object);
    const called = context.getProp(target, method);
    const handles = given.map((each) => this.toEngine(each));
    context.unwrapResult(context.callFunction(called, target, ...handles)).dispose();
    for (const handle of [...handles, called, target]) handle.dispose();
    this.pump();
  }

  /** Bytes that the engine's values take. */
  get memory(): number {
    const usage = this.context.runtime.computeMemoryUsage();
    const { memory_used_size: bytes } = this.context.dump(usage) as { memory_used_size: number };
    usage.dispose();
    return bytes;
  }

  /** Run the engine's pending jobs: promises go on only by them. */
  private pump(): void {
    const done = this.context.runtime.executePendingJobs();
    if (done.error) throw new Error(JSON.stringify(this.context.dump(done.error)));
  }

  private toEngine(value: Crossing): QuickJSHandle {
    const { context } = this;
    if (value === null) return context.null;
    if (typeof value === "number") return context.newNumber(value);
    if (typeof value === "string") return context.newString(value);
    if (typeof value === "boolean") return value ? context.true : context.false;
    if (value instanceof Uint8Array) return context.newArrayBuffer(value.slice().buffer);
    return context.undefined;
  }

  private fromEngine(handle: QuickJSHandle): unknown {
    const { context } = this;
    const kind = context.typeof(handle);
    if (kind !== "object") return context.dump(handle);
    const parts = ["buffer", "byteOffset", "byteLength"].map((name) => context.getProp(handle, name));
    const [buffer, offset, length] = parts as [QuickJSHandle, QuickJSHandle, QuickJSHandle];
    const bytes = context.getArrayBuffer(buffer);
    const copy = bytes.value.slice(context.getNumber(offset), context.getNumber(offset) + context.getNumber(length));
    bytes.dispose();
    for (const part of parts) part.dispose();
    return copy;
  }
}
