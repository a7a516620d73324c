/** A lock between programs. */

import { createHash } from "node:crypto";
import { rmSync } from "node:fs";
import { connect, createServer, type Server } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";

/**
 * A lock that the system releases when its program ends in any way, because Node has no file locks: a listening socket, whose
 * name only one program can have.
 */
export class SystemLock {
  private constructor(private readonly server: Server) {}

  /**
   * Take the lock of this name; undefined if another program, or this one, has it.
   *
   * @param platform a name of `process.platform`.
   * @throws Error the system has no such lock.
   */
  static async take(name: string, platform: string = process.platform): Promise<SystemLock | undefined> {
    const address = addressOf(name, platform);
    const server = (await listening(address)) ?? (platformKeepsNames(platform) ? await inherited(address) : undefined);
    return server && new SystemLock(server);
  }

  async release(): Promise<void> {
    await new Promise((resolve) => this.server.close(resolve));
  }
}

/** Return whether the name of a socket outlives its program, as on all platforms but Linux and Windows. */
function platformKeepsNames(platform: string): boolean {
  return platform !== "linux" && platform !== "win32";
}

function addressOf(name: string, platform: string): string {
  const short = `moa-edge-${createHash("sha256").update(name).digest("hex").slice(0, 32)}`;
  if (platform === "linux") return `\0${short}`;
  return platform === "win32" ? `\\\\.\\pipe\\${short}` : join(tmpdir(), short);
}

/** Take over the socket file of a program that was killed, at which there is no answer. */
async function inherited(address: string): Promise<Server | undefined> {
  const alive = await new Promise<boolean>((resolve) => {
    const socket = connect(address, () => resolve(true)).on("error", () => resolve(false));
    socket.on("connect", () => socket.destroy());
  });
  if (alive) return undefined;
  rmSync(address, { force: true });
  return listening(address);
}

function listening(address: string): Promise<Server | undefined> {
  return new Promise((resolve, reject) => {
    const server = createServer((socket) => socket.destroy());
    server.on("error", (error: NodeJS.ErrnoException) => (error.code === "EADDRINUSE" ? resolve(undefined) : reject(error)));
    server.listen(address, () => resolve(server.unref()));
  });
}
