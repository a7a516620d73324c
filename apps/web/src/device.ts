/** The bundle in this browser, and the models that are loaded from it. */

import { Bundle, copyingDrafter, hasGraph, loadModels, MemoryStore, type BundleStore, type Drafters, type Models } from "@moa-edge/runtime";
import { browserStore } from "@moa-edge/runtime/browser";

declare const MODELS: string; // set by the build: a file beside this one

/** State of the device's models. */
export type DeviceState =
  | { readonly kind: "looking" | "loading" }
  /** The bundle has no graph: there is nothing to download. */
  | { readonly kind: "copying" }
  /** `why` is a sentence that says what to do. */
  | { readonly kind: "unable"; readonly why: string }
  | { readonly kind: "absent" | "ready"; readonly bytes: number; readonly writes: boolean }
  /** `toGoS`: seconds until the end at the pace so far; null in the first second. */
  | { readonly kind: "downloading"; readonly received: number; readonly total: number; readonly toGoS: number | null }
  /** The received part is kept. */
  | { readonly kind: "stopped"; readonly received: number; readonly total: number; readonly why: string };

const INSECURE =
  "This page came over plain http, so browsers do not let it store data or draft here: it works while the server is reachable. " +
  "Open it by https (moa-serve --web with --tls-cert) to continue without a network.";

const FULL =
  "This browser's storage is full, so this device keeps no model: it works while the server is reachable. " +
  "Free some space, or delete chats, and reload the page to continue without a network.";

/** The bundle and the models of this device. */
export class Device {
  state: DeviceState = { kind: "looking" };
  /** Whether to download the writer, too, if the bundle has one. */
  wantsWriter = true;
  private store: BundleStore = new MemoryStore();
  private full = false; // nothing can be stored: the bundle's texts are in memory
  private models: Models | null = null;
  private download: AbortController | null = null;
  private forgetting: Promise<void> | null = null; // a second tap waits for the first

  /** @param changed called after each change of the state. */
  constructor(private readonly changed: () => void) {}

  /**
   * Open the bundle's texts, from this device if it has them.
   *
   * @param anew ask the server for a newer bundle first.
   * @throws BundleError they cannot be downloaded.
   */
  async open(url: string, anew: boolean): Promise<Bundle> {
    this.full = false;
    this.store = await browserStore();
    const options = { store: this.store, drafter: false };
    if (anew) await Bundle.update(url, options).catch(() => undefined); // without the server, use the stored one
    try {
      return await Bundle.open(url, options);
    } catch (error) {
      if (((error as Error).cause as Error | undefined)?.name !== "QuotaExceededError") throw error;
      this.full = true;
      this.store = new MemoryStore();
      return Bundle.open(url, { store: this.store, drafter: false });
    }
  }

  /** Return loaded drafters if the models are here; else none, and the state tells why. */
  async load(url: string, bundle: Bundle): Promise<Partial<Drafters>> {
    const { architecture, targets } = bundle.manifest;
    if (!hasGraph(architecture)) {
      this.become({ kind: "copying" });
      return { drafter: copyingDrafter(bundle.manifest) };
    }
    if (!isSecureContext) this.become({ kind: "unable", why: INSECURE });
    else if (this.full) this.become({ kind: "unable", why: FULL });
    else if (!targets.has("web")) this.become({ kind: "unable", why: "This server's bundle has no drafter for browsers: export it with --target web." });
    else if (!(await this.holds(url, bundle))) this.become({ kind: "absent", ...this.needs(bundle) });
    else await this.start(bundle);
    if (this.models === null) return {};
    const { drafter, writer } = this.models.forConversation();
    return this.needs(bundle).writes ? { drafter, writer } : { drafter };
  }

  /** Download the models, and resume an earlier download; return whether they are here. */
  async fetch(url: string, bundle: Bundle): Promise<boolean> {
    const { bytes: total, writes } = this.needs(bundle);
    let received = 0;
    this.download = new AbortController();
    this.become({ kind: "downloading", received, total, toGoS: null });
    const began = performance.now();
    let held: number | undefined; // by an earlier download
    void navigator.storage.persist(); // or the browser may drop it where space is short
    try {
      await Bundle.open(url, {
        store: this.store,
        writer: writes,
        signal: this.download.signal,
        onProgress: (bytes, all) => {
          received = Math.max(0, bytes - (all - total)); // the texts are here already, and not part of the offered size
          held ??= received;
          const passedS = (performance.now() - began) / 1000;
          const toGoS = passedS > 1 && received > held ? ((total - received) * passedS) / (received - held) : null;
          this.become({ kind: "downloading", received, total, toGoS });
        },
      });
    } catch (error) {
      const why = this.download.signal.aborted ? "" : (error as Error).message;
      this.become({ kind: "stopped", received, total, why });
      return false;
    }
    return true;
  }

  /** End the download; the received part is kept. */
  cancel(): void {
    this.download?.abort();
  }

  /** Delete the bundle. Throws the browser's error if a file cannot be deleted. */
  forget(): Promise<void> {
    this.forgetting ??= this.forgetAll().finally(() => (this.forgetting = null));
    return this.forgetting;
  }

  /** End the models. */
  async close(): Promise<void> {
    this.cancel();
    await this.models?.close();
    this.models = null;
  }

  private async forgetAll(): Promise<void> {
    this.become({ kind: "looking" });
    await this.close();
    for (const name of await this.store.names()) await this.store.delete(name);
  }

  private async start(bundle: Bundle): Promise<void> {
    this.become({ kind: "loading" });
    const worker = new Worker(new URL(MODELS, import.meta.url), { type: "module" });
    try {
      this.models = await loadModels(bundle, { worker });
      this.become({ kind: "ready", ...this.needs(bundle) });
    } catch (error) {
      worker.terminate();
      this.become({ kind: "unable", why: `${(error as Error).message}. The server drafts meanwhile; reload the page to try again.` });
    }
  }

  /** Return whether all files to download are here. */
  private holds(url: string, bundle: Bundle): Promise<boolean> {
    return Bundle.isHeld(url, { store: this.store, writer: this.needs(bundle).writes });
  }

  /** Return the bytes to download, and whether the writer is among them. */
  private needs({ manifest }: Bundle): { bytes: number; writes: boolean } {
    const writes = this.wantsWriter && manifest.writers.has("web");
    const files = [manifest.targets.get("web")?.file, writes ? manifest.writers.get("web")?.file : undefined].filter((file) => file !== undefined);
    return { bytes: files.reduce((sum, file) => sum + manifest.files.get(file)!.bytes, 0), writes };
  }

  private become(state: DeviceState): void {
    this.state = state;
    this.changed();
  }
}
