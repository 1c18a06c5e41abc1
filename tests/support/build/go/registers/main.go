// SPDX-License-Identifier: Apache-2.0

// The judge of histories: porcupine checks that they are linearizable (Herlihy and Wing, 1990).
//
// Reads histories from standard input, one a line in JSON. A history is what happened to one
// frontend on one node: its versions, written one after the other, and which of them served each
// dial, modulo the number of backends. A version counts as written at some moment between its call
// and its return, for all clients at once. Prints the names of the histories for which there are no
// such moments.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"log"
	"os"

	"github.com/anishathalye/porcupine"
)

type operation struct {
	Write   bool
	Version int
	Call    int64 // nanoseconds
	Return  int64
}

type history struct {
	Name       string
	First      int // the version at the beginning
	Backends   int
	Operations []operation
}

func model(of history) porcupine.Model {
	return porcupine.Model{
		Init: func() interface{} { return of.First },
		Step: func(state, input, output interface{}) (bool, interface{}) {
			now, operation := state.(int), input.(operation)
			if operation.Write {
				return operation.Version == now+1, operation.Version
			}
			return operation.Version == now%of.Backends, now
		},
	}
}

func main() {
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<30)
	for in.Scan() {
		var one history
		if err := json.Unmarshal(in.Bytes(), &one); err != nil {
			log.Fatal(err)
		}
		operations := make([]porcupine.Operation, len(one.Operations))
		for i, each := range one.Operations {
			operations[i] = porcupine.Operation{ClientId: i, Input: each, Call: each.Call, Return: each.Return}
		}
		if !porcupine.CheckOperations(model(one), operations) {
			fmt.Println(one.Name)
		}
	}
	if err := in.Err(); err != nil {
		log.Fatal(err)
	}
}
