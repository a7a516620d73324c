/** The program of `moa-core.js`: it defines the global object `moa`, see {@link NativeCore}. */

import "../text_encoding.js";

import { MoaError } from "../errors.js";
import { NativeBridge, type Given } from "./bridge.js";
import type { NativeCore, NativeHost } from "./native_host.js";
import { Requests } from "./requests.js";

class Core implements NativeCore {
  private bridge: NativeBridge | undefined;
  private requests: Requests | undefined;

  start(host: NativeHost): void {
    this.bridge = new NativeBridge(host);
    this.requests = new Requests(this.bridge, (chat, event) => this.report({ chat, event }));
  }

  request(request: number, name: string, json: string): void {
    void this.answer(request, name, json);
  }

  fired(timer: number): void {
    this.bridge?.fired(timer);
  }

  opened(socket: number): void {
    this.bridge?.opened(socket);
  }

  received(socket: number, frame: Given): void {
    this.bridge?.received(socket, frame);
  }

  closed(socket: number, status: number): void {
    this.bridge?.closed(socket, status);
  }

  answered(call: number, value: unknown): void {
    this.bridge?.answered(call, value);
  }

  failed(call: number, reason: string): void {
    this.bridge?.failed(call, reason);
  }

  private async answer(request: number, name: string, json: string): Promise<void> {
    await undefined; // the program may be within another call
    try {
      const given = JSON.parse(json) as { [name: string]: unknown };
      const result = await this.requests!.do(name, given, (event) => this.report({ request, event }));
      this.report({ request, result: result ?? null });
    } catch (error) {
      const known = error instanceof MoaError;
      const [kind, message] = known ? [error.name, error.message] : ["Defect", `the core failed: ${String(error)}`];
      this.report({ request, error: { name: kind, message } });
    }
  }

  private report(said: object): void {
    this.bridge!.native.report(JSON.stringify(said, (_, value: unknown) => (typeof value === "bigint" ? String(value) : value)));
  }
}

(globalThis as { moa?: NativeCore }).moa = new Core();
