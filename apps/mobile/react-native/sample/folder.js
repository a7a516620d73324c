/** A folder of the app for bundles, by react-native-fs. */

import * as fs from "@dr.pogodin/react-native-fs";

/** Return the folder of this name among the app's documents; see `DownloadFolder`. */
export async function folderOf(name) {
  const folder = `${fs.DocumentDirectoryPath}/${name}`;
  await fs.mkdir(folder);
  const pathOf = (file) => `${folder}/${file}`;
  return {
    pathOf,
    has: (file) => fs.exists(pathOf(file)),
    readText: (file) => fs.readFile(pathOf(file), "utf8"),
    async download(fromUrl, file, headers) {
      const toFile = `${pathOf(file)}.part`; // a broken download leaves the file as it was
      const { statusCode } = await fs.downloadFile({ fromUrl, toFile, headers }).promise;
      if (statusCode !== 200) throw new Error(`HTTP ${statusCode}`);
      if (await fs.exists(pathOf(file))) await fs.unlink(pathOf(file));
      await fs.moveFile(toFile, pathOf(file));
    },
    sha256: async (file) => ((await fs.exists(pathOf(file))) ? fs.hash(pathOf(file), "sha256") : undefined),
  };
}
