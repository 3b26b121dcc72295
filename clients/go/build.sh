#!/bin/sh
# Makes the stubs (package specdec/v1 of the module example.com/client) and ./client in this folder. Needs go, protoc,
# protoc-gen-go and protoc-gen-go-grpc. The libraries are Go modules, or with GO111MODULE=off those of GOPATH: on Debian 13
# GO111MODULE=off GOPATH=/usr/share/gocode, and the package golang-google-grpc-dev.
set -e
cd "$(dirname "$0")"
module=example.com/client
stubs=$module/specdec/v1
protoc -I ../../protos --go_out=. --go-grpc_out=. \
  --go_opt=module=$module --go_opt=Mspecdec/v1/types.proto=$stubs \
  --go_opt=Mspecdec/v1/generation_service.proto=$stubs \
  --go-grpc_opt=module=$module --go-grpc_opt=Mspecdec/v1/types.proto=$stubs \
  --go-grpc_opt=Mspecdec/v1/generation_service.proto=$stubs \
  ../../protos/specdec/v1/generation_service.proto ../../protos/specdec/v1/types.proto
if [ "$(go env GO111MODULE)" = off ]; then
  mkdir -p gopath/src/example.com
  ln -sfn ../../.. gopath/src/$module
  GOPATH=$PWD/gopath:$(go env GOPATH) go build -o client $module
else
  test -f go.mod || go mod init $module
  go mod tidy
  go build -o client .
fi
