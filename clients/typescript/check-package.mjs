// Packs the package and compiles the example against it in an empty project, where only its own dependencies are.
import { execSync } from "node:child_process";
import { copyFileSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const here = fileURLToPath(new URL(".", import.meta.url));
const folder = mkdtempSync(join(tmpdir(), "tandem-client-"));
try {
  const run = (command, cwd) => execSync(command, { cwd, stdio: ["ignore", "pipe", "inherit"], encoding: "utf8" });
  const [{ filename, files }] = JSON.parse(run(`npm pack --json --pack-destination ${folder}`, here));
  writeFileSync(join(folder, "package.json"), JSON.stringify({ type: "module", private: true }));
  run(`npm install --ignore-scripts ./${filename} @types/node@20.19.0`, folder);
  copyFileSync(join(here, "examples/chat.ts"), join(folder, "chat.ts"));
  const options = "--strict --target es2022 --lib es2023,esnext.disposable --module nodenext --types node --skipLibCheck false";
  run(`${here}node_modules/.bin/tsc ${options} chat.ts`, folder);
  console.log(`${filename}: ${files.length} files`);
} finally {
  rmSync(folder, { recursive: true, force: true });
}
