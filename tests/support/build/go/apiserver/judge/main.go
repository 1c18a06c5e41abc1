// SPDX-License-Identifier: Apache-2.0

// The judge of kbpf's policy: kube-proxy's own functions, of the version that go.mod pins.
//
// Reads one question a line, writes one answer a line, both in JSON. A question is a node, the
// Services and EndpointSlices that its kube-proxy has seen, and the addresses of its interfaces.
// The answer says for each IP family what kube-proxy would have made of it. Where it depends on the
// order in which Go walks a map (copies of one endpoint in several slices), `tries` asks for so many
// walks, and every distinct answer is given.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"log"
	"net"
	"os"
	"reflect"
	"sort"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/proxy"
	proxyutil "k8s.io/kubernetes/pkg/proxy/util"
)

type question struct {
	Node              string
	Zone              string
	Services          []*v1.Service
	Slices            []*discovery.EndpointSlice
	NodePortAddresses []string
	Interfaces        []string // addresses in CIDR notation
	Tries             int
}

type servicePort struct {
	Name, Protocol, ClusterIP                    string
	Port, NodePort, HealthCheckNodePort          int
	ExternalIPs, LoadBalancerVIPs, SourceRanges  []string
	AffinitySeconds                              int // 0: none
	ExternalLocal, InternalLocal                 bool
	ExternallyAccessible, UsesCluster, UsesLocal bool
	Cluster, Local, All                          []string // address:port, sorted
	HasAny                                       bool
}

type family struct {
	Ports       []servicePort  // by name
	HealthPorts map[string]int // Service: its health check's port
	LocalReady  map[string]int // Service: endpoints on this node that are ready
	NodeIPs     []string       // where NodePorts are served
}

type answer struct {
	Error  string   `json:",omitempty"`
	V4, V6 []family // distinct ones
}

type interfaces []string

func (all interfaces) InterfaceAddrs() ([]net.Addr, error) {
	var found []net.Addr
	for _, one := range all {
		ip, network, err := net.ParseCIDR(one)
		if err != nil {
			return nil, err
		}
		found = append(found, &net.IPNet{IP: ip, Mask: network.Mask})
	}
	return found, nil
}

func main() {
	klog.InitFlags(nil)
	_ = flag.Set("logtostderr", "false")
	_ = flag.Set("stderrthreshold", "FATAL")
	klog.SetOutput(nothing{})
	in, out := json.NewDecoder(bufio.NewReader(os.Stdin)), bufio.NewWriter(os.Stdout)
	encoder := json.NewEncoder(out)
	for in.More() {
		var q question
		if err := in.Decode(&q); err != nil {
			log.Fatal(err) // what follows cannot be told apart
		}
		if err := encoder.Encode(answered(&q)); err != nil {
			log.Fatal(err)
		}
		if err := out.Flush(); err != nil {
			log.Fatal(err)
		}
	}
}

type nothing struct{}

func (nothing) Write(p []byte) (int, error) { return len(p), nil }

func answered(q *question) (a answer) {
	var err error
	if a.V4, err = distinct(q, v1.IPv4Protocol); err == nil {
		a.V6, err = distinct(q, v1.IPv6Protocol)
	}
	if err != nil {
		a.Error = err.Error()
	}
	return a
}

func distinct(q *question, ipFamily v1.IPFamily) ([]family, error) {
	var found []family
	for try := 0; try < max(q.Tries, 1); try++ {
		one, err := once(q, ipFamily)
		if err != nil {
			return nil, err
		}
		known := false
		for _, other := range found {
			known = known || reflect.DeepEqual(one, other)
		}
		if !known {
			found = append(found, one)
		}
	}
	return found, nil
}

func once(q *question, ipFamily v1.IPFamily) (family, error) {
	services := proxy.NewServiceChangeTracker(ipFamily, nil, nil)
	for _, one := range q.Services {
		services.Update(nil, one)
	}
	ports := proxy.ServicePortMap{}
	ports.Update(services)
	slices := proxy.NewEndpointsChangeTracker(ipFamily, q.Node, nil, nil)
	for _, one := range q.Slices {
		slices.EndpointSliceUpdate(one, false)
	}
	endpoints := proxy.EndpointsMap{}
	endpoints.Update(slices)

	made := family{Ports: []servicePort{}, HealthPorts: map[string]int{}, LocalReady: map[string]int{}}
	labels := map[string]string{}
	if q.Zone != "" {
		labels[v1.LabelTopologyZone] = q.Zone
	}
	for name, port := range ports {
		cluster, local, all, any := proxy.CategorizeEndpoints(endpoints[name], port, q.Node, labels)
		made.Ports = append(made.Ports, servicePort{
			Name: name.String(), Protocol: string(port.Protocol()), ClusterIP: port.ClusterIP().String(),
			Port: port.Port(), NodePort: port.NodePort(), HealthCheckNodePort: port.HealthCheckNodePort(),
			ExternalIPs: texts(port.ExternalIPs()), LoadBalancerVIPs: texts(port.LoadBalancerVIPs()),
			SourceRanges: texts(port.LoadBalancerSourceRanges()), AffinitySeconds: affinity(port),
			ExternalLocal: port.ExternalPolicyLocal(), InternalLocal: port.InternalPolicyLocal(),
			ExternallyAccessible: port.ExternallyAccessible(),
			UsesCluster:          port.UsesClusterEndpoints(), UsesLocal: port.UsesLocalEndpoints(),
			Cluster: texts(cluster), Local: texts(local), All: texts(all), HasAny: any,
		})
	}
	sort.Slice(made.Ports, func(i, j int) bool {
		a, b := made.Ports[i], made.Ports[j]
		return a.Name+a.Protocol < b.Name+b.Protocol
	})
	for name, port := range ports.HealthCheckNodePorts() {
		made.HealthPorts[name.String()] = int(port)
	}
	for name, count := range endpoints.LocalReadyEndpoints() {
		made.LocalReady[name.String()] = count
	}
	ips, err := proxyutil.NewNodePortAddresses(ipFamily, q.NodePortAddresses).GetNodeIPs(interfaces(q.Interfaces))
	made.NodeIPs = texts(ips)
	return made, err
}

func affinity(port proxy.ServicePort) int {
	if port.SessionAffinityType() != v1.ServiceAffinityClientIP {
		return 0
	}
	return port.StickyMaxAgeSeconds()
}

func texts[T interface{ String() string }](all []T) []string {
	found := make([]string, 0, len(all))
	for _, one := range all {
		found = append(found, one.String())
	}
	sort.Strings(found)
	return found
}
