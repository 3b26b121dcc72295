// Makes src/generated/ from the protos with ts-proto: types/ holds the public types, wire/ reads and writes them.
// PROTOC is the compiler: protoc, or "python -m grpc_tools.protoc".
import { execFileSync } from "node:child_process";
import { mkdirSync, rmSync } from "node:fs";
import { fileURLToPath } from "node:url";

const here = fileURLToPath(new URL(".", import.meta.url));
const protos = fileURLToPath(new URL("../../protos/", import.meta.url));
const [command, ...first] = (process.env.PROTOC ?? "protoc").split(" ");
const both = [
  "importSuffix=.js",
  "forceLong=bigint",
  "stringEnums=true",
  "enumsAsLiterals=true",
  "removeEnumPrefix=true",
  "outputJsonMethods=false",
];

rmSync(`${here}src/generated`, { recursive: true, force: true });

function generate(folder, ...options) {
  const out = `${here}src/generated/${folder}`;
  mkdirSync(out, { recursive: true });
  execFileSync(
    command,
    [
      ...first,
      `-I${protos}`,
      `--plugin=protoc-gen-ts_proto=${here}node_modules/.bin/protoc-gen-ts_proto`,
      `--ts_proto_out=${out}`,
      `--ts_proto_opt=${[...both, ...options].join(",")}`,
      "specdec/v1/generation_service.proto",
      "specdec/v1/types.proto",
    ],
    { stdio: "inherit" },
  );
}

generate("types", "onlyTypes=true", "outputServices=none");
generate("wire", "env=node", "esModuleInterop=true", "outputServices=grpc-js", "useExactTypes=false");
