# SPDX-License-Identifier: Apache-2.0
"""Mutants of the C code: one changed place each, and the tests that have to notice it.

The mutant replaces the file in a copy of the tree, where it is compiled before the tests run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kbpf.dataplane.bpf.hooks import UNITS
from kbpf.dataplane.bpf.programs import artifact, compile
from tests.mutations.groups import paths_of

FLOWS = "packets/path/ packets/views maps/flows/"
PROGRAMS = {
    "CHOICE": "sockets/connect sockets/affinity maps/isolation packets/dials sockets/slots maps/atomic packets/path/",
    "SOCKETS": "sockets/connect sockets/udp/ packets/dials sockets/account sockets/exemptions sockets/agent_sockets"
    " sockets/kernel_sockets",
    "PACKETS": "packets/path/ packets/packet_devices packets/views",
    "FLOWS": FLOWS,
    "SHARES": f"{FLOWS} maps/isolation",
    "ROOM": "maps/flows/ packets/path/",
    "MONITOR": "sockets/monitor",
}
TESTS = {name: paths_of("programs", names) for name, names in PROGRAMS.items()} | {
    "CONNTRACK": (
        "tests/lab/outside/test_conntrack.py",
        "tests/lab/outside/test_subnets.py",
        "tests/lab/outside/test_clsact.py",
        "tests/lab/outside/test_batches.py",
    ),
    "BRIDGE": ("tests/lab/outside/test_br_netfilter.py",),
    "COMPARED": ("tests/fuzz/packets/test_conntrack.py",),
}
"""COMPARED must notice each of its mutants: they prove that the comparison works."""


class Patch(NamedTuple):
    """A mutant: its name, the file below the root, the text that is replaced, the replacement, and
    the tests that judge it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """The text of the file with the mutant."""
        assert source.count(self.old) == 1, self.name
        return source.replace(self.old, self.new)

    @property
    def units(self) -> tuple[str, ...]:
        """The units that include the file."""
        mark = f'#line 1 "{self.file}"'
        return tuple(unit for unit in UNITS if mark in artifact.flatten(unit))


def build_base(folder: Path) -> None:
    """Compiles the programs without a mutant."""
    for unit in UNITS:
        compile.find_or_compile(unit, folder)


def _read(text: str) -> Iterator[Patch]:
    """A file below kbpf/bpf and its judges after "#"; then for each mutant its name, and the lines that
    are replaced and those that replace them, as in a diff.
    """
    for part in text.split("\n# ")[1:]:
        head, *lines = part.splitlines()
        file, tests = head.split()
        while lines:
            name, sides = lines.pop(0), {"-": list[str](), "+": list[str]()}
            while lines and lines[0][0] in sides:
                mark, _, line = lines.pop(0).partition(" ")
                sides[mark].append(line)
            yield Patch(name, f"kbpf/bpf/{file}", "\n".join(sides["-"]), "\n".join(sides["+"]), TESTS[tests])


PATCHES = tuple(
    _read("""
# lib/addr.h PACKETS
broadcast and multicast sources are accepted
- (a->word[3] & 0xf0) == 224
+ (a->word[3] & 0xff) == 240
0.0.0.0 is accepted as a source
- !a->word[3] || (a->word[3] & 0xff) == 127
+ (a->word[3] & 0xff) == 127
IPv6 multicast sources are accepted
- is_link_local(a) || (a->word[0] & 0xff) == 0xff
+ is_link_local(a)
IPv6 link-local sources are accepted
- is_loopback(a) || is_link_local(a) ||
+ is_loopback(a) ||
# lib/addr.h ROOM
a newer time of another CPU counts as very old
- now > then ? now - then : 0
+ now - then
# lookup.h CHOICE
NodePorts on loopback without the setting
- (config_flags() & CONFIG_LOCALHOST_NODE_PORTS) && is_host(netns)
+ is_host(netns)
NodePorts on loopback in pods
- (config_flags() & CONFIG_LOCALHOST_NODE_PORTS) && is_host(netns)
+ config_flags() & CONFIG_LOCALHOST_NODE_PORTS
NodePorts on all addresses
- return find_node_address(a) != NULL;
+ return true;
the wildcard address is a frontend
- is_any(&key.address) ? MISSING : read_service(&key, out)
+ read_service(&key, out)
the value of another key is used
- check_of_service(key, out) == out->check ? STEADY : UNSTEADY
+ STEADY
a port of another word counts
- word = number / 64;
+ word = number / 63;
affinity does not end
- elapsed(last->last_used, now) > timeout)
+ false)
affinity with a backend that left the set
- find_member(&member) ? member.backend : 0
+ member.backend
affinity of one Service counts for others
- key.service = service->id;
- 	last.last_used
+ last.last_used
affinity is not counted as a reason
- *reason = TRANSLATED_BY_AFFINITY;
+ *reason = TRANSLATED;
one affinity entry more than the share
- c && c->affinity_share && *share >= c->affinity_share
+ c && c->affinity_share && *share > c->affinity_share
an existing entry counts again in the share
- (stored || take_share(client))
+ take_share(client)
the share is not counted
- (stored || take_share(client))
+ true
the Maglev table is not used
- if (set->table) {
+ if (false) {
Maglev chooses at random
- client->tuple && (service->flags & SERVICE_MAGLEV)
+ false
Maglev with affinity hashes the port
- service->affinity_timeout ? CLIENT_WORDS : TUPLE_WORDS
+ TUPLE_WORDS
the last slot is never chosen
- ((u64)bpf_get_prandom_u32() * size) >> 32
+ ((u64)bpf_get_prandom_u32() * (size - (size > 1))) >> 32
the internal policy is ignored
- return service->flags & SERVICE_INTERNAL_LOCAL;
+ return false;
the internal policy applies to all frontends
- if (service->flags & SERVICE_CLUSTER_IP)
- 		return service->flags & SERVICE_INTERNAL_LOCAL;
+ if (service->flags & SERVICE_INTERNAL_LOCAL)
+ 		return true;
there is no short circuit
- client->outside && (service->flags & SERVICE_EXTERNAL_LOCAL)
+ service->flags & SERVICE_EXTERNAL_LOCAL
NodePorts use the Service's ranges
- 		key.service = 0;
-
+ 		;
+
unknown ports of a ClusterIP pass
- return is_cluster_ip ? REFUSE : PASS;
+ return PASS;
source ranges are ignored
- (service.flags & SERVICE_RESTRICTED) && !source_allowed(&service, client)
+ false
a socket with unknown source is refused
- return client->tuple ? DROP : PASS;
+ return client->tuple ? DROP : REFUSE;
the local set has the cluster set's size
- local ? service.local_size : service.cluster_size
+ service.cluster_size
no local endpoint counts as no endpoint
- local && (service.flags & SERVICE_ANY_ENDPOINTS)
+ false
# tc/flow.h FLOWS
a SYN with FIN or RST begins a connection
- (flags & (TCP_SYN | TCP_ACK | TCP_FIN | TCP_RST)) == TCP_SYN
+ (flags & (TCP_SYN | TCP_ACK)) == TCP_SYN
SCTP expires as UDP does
- flow->client.protocol == IPPROTO_SCTP ? 210 : 120
+ 120
a direct connection waits for a backend in TIME_WAIT
- return !both_closed(flow) || (reply && flow->syn);
+ return !both_closed(flow);
an answered datagram expires late
- return 30 * SECOND;
+ return 120 * SECOND;
an established connection expires after an hour
- return 24 * 3600 * SECOND;
+ return 3600 * SECOND;
a closing connection expires early
- return 3600 * SECOND;
+ return 360 * SECOND;
an answered SYN expires late
- 		return 60 * SECOND;
+ 		return 600 * SECOND;
one FIN closes
- (flow->fins & FIN_CLIENT) && (flow->fins & FIN_BACKEND)
+ (flow->fins & FIN_CLIENT) || (flow->fins & FIN_BACKEND)
a handshake is not half open
- flow->state == STATE_NEW || flow->state == STATE_ANSWERED;
+ flow->state == STATE_NEW;
a closing flow is never evictable
- return quiet > CLOSING_SECONDS * SECOND;
+ return false;
an unproven flow is never evictable
- flow->state != STATE_ESTABLISHED && quiet > UNPROVEN_SECONDS * SECOND
+ false
the end of a window is not tested
- in_order(n->sequence, limit) &&
the start of a window is not tested
- in_order(own->next - own->room, n->next) &&
an ACK of what was not sent counts
- in_order(n->ack, last) &&
an ACK may be any time behind its own side's
-  &&
- 	       in_order(own->ack - tolerance(own), n->ack);
+ ;
packets count on any device
- if (flow->arrival != arrival)
- 		return false;
SCTP needs no tag
- : p->sctp.tag == flow->seen.sctp.tag
+ : true
a late reply makes no stream
- return elapsed(flow->seen.started, now) > STREAM_SECONDS * SECOND;
+ return false;
# tc/judge.h FLOWS
the side that closes first is not recorded
- FIN_BACKEND | FIN_BACKEND_FIRST;
+ FIN_BACKEND;
the FINs that two CPUs have seen are not merged
- original->fins |= own->fin | peer->fin;
+ original->fins |= own->fin;
a SYN does not restart a closed flow
- if (original->state != STATE_CLOSED || both_closed(original))
+ if (true)
the backend's old segments reach a new client
- 		original->fins |= FIN_RESERVED;
- 		return TAKEN;
+ 		return IGNORED;
conntrack waits for an answer that was denied
- 			tails.call(skb, TAIL_REFUSE);
-
any SYN-ACK is an answer
-  ||
- 	    !answers_syn(original, n, flags)
segments are not compared with the other side
- if (!(flags & TCP_ACK) || !fits)
+ if (false)
a limit that another CPU has lowered stays
- matches_both(own, peer, n, is_half_open(original))
+ matches_both(own, peer, n, true)
a refusal ends a connection
- (flags & (TCP_SYN | TCP_ACK | TCP_RST)) == (TCP_SYN | TCP_ACK)
+ (flags & (TCP_SYN | TCP_RST)) && (flags & TCP_ACK)
a RST counts with any number
- if (n->sequence != peer->ack && !sent)
+ if (false)
the refusal of another connection reaches a refused client
- reply && !own->window && n->ack != original->syn
+ false
the port of a refused connection is reserved
- end_backend(original, backend, client);
the backend proves a handshake that its client has not ended
- if (reply || !in_order(own->ack, n->ack))
+ if (!in_order(own->ack, n->ack))
the backend's segments outside of the window reach the client
- (result == OUTSIDE && reply)
+ false
any device may speak for the backend
- arrival == flow->arrival || arrives_by(skb, p, arrival, &s->hop)
+ true
an INIT-ACK's tag is not stored
- peer->tag = announced;
+ ;
what the backend sends of another association reaches the client
- (state == STATE_NEW || p->sctp.tag != peer->tag)
+ state == STATE_NEW
what the backend repeats is taken for the answer to a forged SYN
- return !original || (both_closed(original) && is_acknowledged(original, flow));
+ return true;
a SYN past the Service and its answer end a half-closed connection
- (original && original->state != STATE_CLOSED)
+ (original && !is_ending(original))
any SYN-ACK of the backend answers a direct SYN
- return p->tcp.ack == flow->syn;
+ return true;
later fragments of an older connection reach a new client
- tcp && reply && flow->state == STATE_NEW ? DENIED : IGNORED
+ IGNORED
a flow that keeps only its port passes everything
- !tcp || is_in_own_window(&flow->seen.tcp, &p->tcp) ? IGNORED : OUTSIDE
+ IGNORED
a backend with another connection does not mark the port of an answered one
- 			original->fins |= FIN_RESERVED;
- 		return OUTSIDE;
+ 			;
+ 		return OUTSIDE;
an ACK may be any time behind the other side's
-  &&
- 	       in_order(peer->next - tolerance(own), n->ack);
+ ;
# tc/receive.h BRIDGE
forged answers pass in frames for others
- else if (!uses_conntrack())
+ else
# tc/receive.h CONNTRACK
forged answers pass behind two priority tags
- !(inner & __builtin_bswap16(VLAN_VID_MASK)) && uses_conntrack();
+ false;
forged ACKs pass
- answers_refused(&tuple) || is_nodes_own
+ is_nodes_own
# tc.c CONNTRACK
packets in the node's name pass
- if (!flags && pretends_to_be_node(skb, device, &p->tuple))
+ if (false)
what the node answers counts as no connection
- if (!flags && is_first_answer(skb, s, nfct)) {
+ if (false) {
# tc.c FLOWS
frames that are not to this machine are translated
- (skb->pkt_type != PACKET_HOST || has_source_route(skb, p))
+ has_source_route(skb, p)
# tc/receive.h FLOWS
fragments of martians are recorded
- if (is_martian(&p->tuple.from.address))
- 		return false;
first fragments are not recorded
- fragments.update(&slot, &fragment);
+ ;
fragments of another datagram match
- !stored || stored->id != fragment.id || stored->hash != fragment.hash
+ !stored
frames for other machines are translated at a bridge's port
- if (has_own_mac(skb, device))
+ if (1)
a packet is handled at the port and at the bridge
- if (skb->tc_index != HANDLED_AT_PORT)
# tc/devices.h SHARES
a pod is known by its address
- in && (in->flags & DEVICE_PEER)
+ false
pods behind a bridge share a network
- ? OWNER_ADDRESS : OWNER_NETWORK
+ ? OWNER_NETWORK : OWNER_NETWORK
# tc/entries.h FLOWS
a tenant can tell which ports it puts in doubt
- keyed[i] = words[i] ^ secret->until[i];
+ keyed[i] = words[i];
no port is in doubt
- if (!may_be_answered(flow, reply, now))
+ if (true)
a port is not in doubt though a FIN was not acknowledged
- (both_closed(flow) && (!reply || is_acknowledged(flow, reply))));
+ both_closed(flow));
a backend that sends for longer than its client leaves no doubt
- reply->last_used > flow->last_used)
+ false)
a port in doubt is in doubt for ever
- return until && *until > seconds_of(now);
+ return until && *until;
a port is in doubt again after eighteen hours
- return until && *until > seconds_of(now);
+ return until && (u16)(*until - seconds_of(now) - 1) <= DOUBT_SECONDS;
# tc/known.h FLOWS
UDP stays with a deleted backend
- if (!backend_exists(flow->backend_id))
- 			return RESTART_YES;
an unanswered datagram never restarts its flow
-
- 		       (flow->state == STATE_NEW && elapsed(flow->last_used, now) > SECOND);
+  RESTART_NO;
a datagram to the Service does not change where a pod's answers come from
- return (flow->fins & FIN_DIRECT) ||
-
+ return
+
fragments count from any device
- return arrival == flow->arrival && flow->state != STATE_NEW;
+ return true;
a client never gets another port
- if ((flow->fins & FIN_RESERVED) &&
-
+ if (false &&
+
the time of a packet is not recorded
- 	flow->last_used = now;
- 	if (flow->client.protocol == IPPROTO_TCP)
+ 	if (flow->client.protocol == IPPROTO_TCP)
a packet at egress does not refresh its flow
- 	if (flow->client.protocol == IPPROTO_UDP)
- 		flow->last_used = now;
# tc/translate.h FLOWS
a datagram to the backend does not change it either
- if (idle || !begins_direct(flow, flags, s))
+ if (1)
any pod changes it
- s->pod_device && flow->out.ifindex == s->pod_device
+ 1
a datagram changes it for masqueraded flows
- !has_snat(flow) && s->pod
+ s->pod
any device speaks for the node's sockets
- 		return false;
- 	return !is_elsewhere(
+ 		return true;
+ 	return !is_elsewhere(
others use a client's port
- ? EGRESS_DENIED
+ ? EGRESS_UNKNOWN
others use a port of the node's socket
- return flow->host_device;
+ return false;
others use a port of conntrack's
- && t->from.port == flow->snat_port
+ && true
a SYN to the backend itself belongs to the flow
- if (!reply && is_direct_connection(flow, p, flags))
+ if (false)
packets are redirected at a bridge's port
- if (s->port_of && is_redirected_from(flow, s->port_of))
+ if (0)
replies keep the backend's address
- new->from = flow->frontend;
+ ;
replies keep the translated client port
- new->to.port = flow->client.port;
+ ;
# tc/forward.h FLOWS
the TTL is not decremented
- to ? p->ttl - 1 : p->ttl
+ p->ttl
# tc/devices.h FLOWS
martian sources are translated
- return is_martian(a) || is_nodes_own(a);
+ return is_nodes_own(a);
marks are not set
- skb->mark = in ? skb->mark | n->mark : skb->mark & ~n->mark;
+ ;
marks are not cleared
- skb->mark & ~n->mark
+ skb->mark
the node's own sources are translated
- return device_sources.lookup(&key);
+ return false;
# tc/begin.h FLOWS
a hairpin connection is not masqueraded
- if (same_address(client, &c->backend.address))
- 		return true;
external Local is masqueraded
- return !(c->flags & SERVICE_EXTERNAL_LOCAL);
+ return true;
masquerade-all is ignored
- return n->flags & NODE_MASQUERADE_ALL;
+ return false;
local networks are inverted
- return !local_networks.lookup(&key);
+ return local_networks.lookup(&key);
local devices are masqueraded
- return !(device->flags & DEVICE_LOCAL);
+ return true;
a pause of new flows is ignored
- return until && *until > now;
+ return false;
a backend at a node address is masqueraded
- is_nodes_own(&flow->backend.address))
+ false)
no client is outside
- client.outside = !(device->flags & DEVICE_LOCAL);
+ client.outside = false;
# tc/devices.h CONNTRACK
the beginning of a divided SYN passes
- (!p->tcp_flags || (p->tcp_flags & TCP_SYN)) &&
+ false &&
# tc/conntrack.h CONNTRACK
forged answers pass
- return uses_conntrack() && find_unconfirmed(&answer->to, &answer->from);
+ return false;
forged answers that were not seen count
- !begins_again(s)
+ true
keys of a refused flow stay
- if (event && event->time == oldest->time) /* no other CPU has begun it again */
+ if (false)
the filter counts no key
- __sync_fetch_and_add(&slot->unconfirmed, 1);
+ ;
what the node has answered unseen begins again
- if (is_nodes_own(&event->backend.address)) {
+ if (false) {
open connections to the node end if their answers leave unseen
- if (is_nodes_own(&event->backend.address) && (status & IPS_SEEN_REPLY)) {
+ if (false) {
a key that is left ends a later connection
- if (status && find_flow_of_entry(s)) {
+ if (status) {
flows that leave unseen are refused
- await_packet(skb, s, port, s->begin & BEGIN_UNSEEN);
+ await_packet(skb, s, port, false);
an answer just ahead of the first packet counts
- (status & IPS_SEEN_REPLY) || (nfct & NFCT_INFO) != IP_CT_NEW
+ false
what has passed the rules by a flowtable leaves
- return find_entry(skb, s, &answer) && find_flow_of_entry(s) ? finish
+ return false ? finish
a forged answer that leaves confirms a flow
- if (!is_nodes_own(&event->backend.address))
+ if (false)
another connection of the node has the key of an earlier flow
- return same ? event : NULL;
+ return event;
what has lost its entry leaves
- return is_established && has_expired(nfct) ?
+ return false ?
refused flows stay
- expire_entry(skb, answer);
+ ;
a SYN behind the end of its connection stays untranslated
- skb->priority = PRIORITY_OF_TRACKED
+ skb->priority = 0
a port that conntrack knows is not replaced
- 		s->begin = (s->begin & ~BEGIN_STALE) | BEGIN_OTHER_PORT;
- 		return go(skb, TAIL_CONNTRACK);
+ 		return drop_flow(&s->flow, reason);
the port of a connection that has ended is in the way
- result = TRACKED_ENDED;
+ result = TRACKED_YES;
a port of another flow is taken
- if (ask ? has_flow(&reply) : flow_between(&reply) != NULL)
+ if (false)
conntrack's port is given to a flow of ours
- return CALL_WITH(is_taken, skb, &reply, v6, &opts, true, false) ? claim_again(skb, s)
+ return false ? claim_again(skb, s)
# tc/begin.h CONNTRACK
what conntrack translates is routed as sent by the node
- has_snat(flow) && !(s->begin & BEGIN_UNTRACKED)
+ has_snat(flow)
a route that encapsulates hides its device
- if (to ? to->flags & DEVICE_NO_EGRESS : s->hop.ifindex)
+ if (to && (to->flags & DEVICE_NO_EGRESS))
# lib/packet.h CONNTRACK
a frame's padding is part of its packet
- p->protocol == IPPROTO_TCP && bytes >= 4 + sizeof(rest) &&
+ p->protocol == IPPROTO_TCP &&
# tc/error.h CONNTRACK
an error about an answer to what has not left passes
- if (answers_refused(&s->inner.tuple)) /* it may have been just ahead of the key */
+ if (false)
# tc/ports.h FLOWS
a client gets the port of a frontend
- if (has_snat(&s->flow)) {
+ if (false) {
the client port is never changed
- if (i || (n->flags & NODE_COEXISTING) ||
+ if ((n->flags & NODE_COEXISTING) ||
the client's port is never kept
- if (search == SEARCH_RANDOM && (index >= s.count || port_at(&s, index) != flow->snat_port))
+ if (search == SEARCH_RANDOM)
the last port is never kept
- index >= s.count ||
+ index + 1 >= s.count ||
ports of half-closed connections are given away
- return entry->state == STATE_CLOSED && /*
+ return is_ending(entry) && /*
ports of datagrams are given away
- entry->client.protocol == IPPROTO_UDP || (entry->fins & FIN_REPLACED)
+ false
ports in doubt are taken
- doubtful = is_in_doubt(backend, flow->snat_port, now);
+ doubtful = false;
ports of the node's servers are taken
- if (is_for_socket(skb, flow)) {
+ if (false) {
a port in the backend's TIME_WAIT is taken first
- return !fresh || !(entry->fins & FIN_BACKEND_FIRST);
+ return true;
FINs need no acknowledgement
- is_acknowledged(original, reply_entry)
+ true
each client may have all ports
- size < SHARED_PORTS ? 1 : SHARES
+ 1
a client that gets no port sends from its former one
- 	forget_former(&s->flow);
- 		return drop_flow
+ 	return drop_flow
reply entries stay when there is no room
- 	release_replies(&s->flow);
-
# tc/error.h FLOWS
extension headers hide others who use a client's port
- if (has_hidden_ports(&s->packet) && skb->ingress_ifindex &&
+ if (false &&
errors of martians bypass the stack
- is_impossible_source(&p->tuple.from.address) ||
+ false ||
errors with a source route bypass the stack
- || has_source_route(skb, p))
+ )
outer addresses of ICMP errors are not translated
- outer.from.address = after->from.address;
+ ;
a masqueraded client's router is not masqueraded
- if (hidden || same_address(
+ if (same_address(
ICMP redirects are translated
- return p->icmp_type == ICMP_REDIRECT;
+ return false;
errors to others than the sender are translated
- return same_address(&t->to.address, &s->packet.tuple.to.address);
+ return true;
any pod sends errors for others
- !arrives_by(skb, p, skb->ifindex, &s->hop)
+ false
errors of routers without a route are left alone
- same_address(&p->tuple.from.address, &tuple.from.address)) &&
+ true) &&
errors about flows that bypass the stack take it
- translation.path != PATH_STACK && !translation.host_device
+ 0
# tc/flow.h FLOWS
frontends are not marked
- *frontend = generations->current;
+ ;
backends are not marked
- *backend = generations->current;
+ ;
the destination's mark is not tested
- (is_marked(&t->to, generations) || is_marked(&t->from, generations))
+ is_marked(&t->from, generations)
the source's mark is not tested
- (is_marked(&t->to, generations) || is_marked(&t->from, generations))
+ is_marked(&t->to, generations)
marks of earlier generations count
- *mark >= generations->oldest
+ *mark
# tc/evict.h ROOM
recent handshakes are evicted
- if (is_half_open(flow) && elapsed(flow->last_used, now) < SECOND)
+ if (false)
needed flows are evicted
- else if (!is_needed(flow, now))
- 			break;
+ else
+ 			break;
needed flows lose their place in the queue
- if (flow_queue.push(&oldest, 0)) { /* another CPU has filled the queue */
- 			in_use = true;
- 			break;
- 		}
keys of deleted flows stay counted
- __sync_fetch_and_add(total, -1);
- 			return; /* it is gone already */
+ return;
UDP streams are not evicted for TCP
- if ((!for_udp && flow->client.protocol == IPPROTO_UDP) ||
+ if (
a live flow is overwritten
- if (!is_over(old, flow->last_used) && !both_closed(old))
+ if (false)
no flow is evicted
- return is_over_limit(total, n) ? go(skb, TAIL_EVICT) : go(skb, TAIL_CLAIM);
- }
-
- /* Makes
+ return go(skb, TAIL_CLAIM);
+ }
+
+ /* Makes
# tc/hop.h PACKETS
a next hop is cached for a minute
- < minute + second
+ < 2 * minute
a next hop is never cached
- age + minute < minute + second
+ false
a next hop is cached again after 26 days
- age + minute < minute + second
+ (s32)age < (s32)second
a torn next hop is used
- check_of_next_hop(hop) == hop->check
+ true
a packet longer than the MTU is redirected
-  && wire_length(skb, p) <= hop->max_length
# tc/forward.h PACKETS
a packet with TTL 1 is forwarded
- !t->host_device && p->ttl > 1;
+ !t->host_device;
# lib/rewrite.h PACKETS
UDP without a checksum gets one
- flags |= BPF_F_MARK_MANGLED_0; /* 0 means
+ ;/*
skb->csum of IPv6 is not updated
- bpf_csum_update(skb, (__sum16)~fold(diff));
+ ;
ports of later fragments are written
- || p->fragment == LATER)
- 		return 0;
+ )
+ 		return 0;
# lib/icmp.h CONNTRACK
errors of no known type do not count
- p->icmp_type < ICMPV6_NO_ERROR
+ p->icmp_type < 5
# lib/icmp.h PACKETS
parameter problems do not count as errors
-  ||
- 		       p->icmp_type == ICMP_PARAMETERPROB;
+ ;
# tc/refuse.h PACKETS
a reset acknowledges too little
- __builtin_bswap32(p->tcp.next) : 0
+ __builtin_bswap32(p->tcp.next - 1) : 0
the limits of a sender share a bucket
- sender.word[0] ^= peer << 4;
ICMP errors have no limit for each peer
- each && each->interval && !take_peer_token
+ false && !take_peer_token
refusals have no limit
- return !all || !all->interval || take_token(&all->spent, all->interval, all->burst, now);
+ return true;
a first refusal costs nothing
- first = now + limit->interval;
+ first = now;
later fragments are refused
- return p->fragment != LATER && (
+ return (
# monitor.h MONITOR
events are written though no command watches
- return until && *until && *until > bpf_ktime_get_ns();
+ return true;
all reasons are shown
- !(monitor->reasons >> (event->reason & 63) & 1))
+ false)
the rate is not limited
- if (!take_token(&monitor->spent, monitor->interval, monitor->burst, event->time) ||
+ if (
what is left out is not counted
- __sync_fetch_and_add(&monitor->left_out, 1);
+ ;
# lib/packet.h PACKETS
options are the payload
- p->l4 = p->l3 + (ip.version_length & 0x0f) * 4;
+ p->l4 = p->l3 + 20;
extension headers are read too long
- : (extension.words + 1) * 8;
+ : (extension.words + 2) * 8;
the first fragment counts as unfragmented
- else if (fragment & IP_MF)
- 		p->fragment = FIRST;
an ABORT is proof
- chunk == SCTP_CID_INIT_ACK || chunk == SCTP_CID_ABORT || chunk == SCTP_CID_ERROR
+ chunk == SCTP_CID_INIT_ACK || chunk == SCTP_CID_ERROR
v4-mapped addresses on the wire are accepted
- if (is_v4(&ip.source) || is_v4(&ip.destination))
- 		return false;
# sock.c SOCKETS
the previous peer is shown
- sock_peers.sk_storage_delete(sk);
- 		return;
+ return;
only the own cgroup is exempt
- if (is_exempt_cgroup(id))
- 			return true;
pods are translated with hostNamespaceOnly
- (flags & CONFIG_HOST_ONLY) && !is_host(netns)
+ false
the agent is translated at all frontends
- c->service && !(c->flags & SERVICE_CLUSTER_IP) &&
+ false &&
the agent is not translated at ClusterIPs
- c->service && !(c->flags & SERVICE_CLUSTER_IP) &&
+ c->service &&
UDP connect() to a ClusterIP's other port fails
- to->protocol == IPPROTO_UDP && c->reason == UNKNOWN_PORT &&
+ false &&
a socket with IP_UNICAST_IF is translated
- place_of_unicast() && (u32)
+ false && (u32)
a socket with IPV6_UNICAST_IF is translated
- sk->family == AF_INET6 && place_of_ipv6() &&
+ false &&
connect() twice chooses twice
- (find_peer(ctx->sk, to, &c) && !last_cut(c.service, &c.backend)) ||
+ false ||
a socket that connects again keeps a cut backend
-  && !last_cut(c.service, &c.backend)
a cut does not include its own tick
- flow->chosen_at <= last_cut
+ flow->chosen_at < last_cut
a flow is never cut
- return flow->chosen_at <= last_cut(flow->service, &flow->backend);
+ return false;
a flow stays with a deleted frontend
- !find_backend(&id) || !is_frontend_of(&flow->frontend, flow->service)
+ !find_backend(&id)
a torn frontend value ends a flow
- return result == UNSTEADY || (result == STEADY && steady.id == id);
+ return result == STEADY && steady.id == id;
a flow is never idle
- elapsed(last_used(flow), now) > FLOW_IDLE_NS ||
+ false ||
replies do not keep a flow
- flow->last_sent > flow->last_received ? flow->last_sent : flow->last_received
+ flow->last_sent
the first place is always reused
- if (used < first) {
+ if (false) {
a reply matches the oldest request
- flow->last_sent >= newest && flow->frontend.protocol
+ !newest && flow->frontend.protocol
a connected socket chooses again
- if (find_peer(sk, to, &c) || find_flow
+ if (find_flow
the former peer is forgotten
- if (!peer || !same_target(&peer->backend, from))
- 		peer = former_peer_of(sk);
a FIN counts as a byte
- payload(ctx->bytes_acked, 1 + fin_was_acked(before))
+ payload(ctx->bytes_acked, 1)
CLOSING has no acknowledged FIN
- state == BPF_TCP_FIN_WAIT2 || state == BPF_TCP_CLOSING ||
+ state == BPF_TCP_FIN_WAIT2 ||
a reset does not count as broken
- if (before == BPF_TCP_ESTABLISHED || before == BPF_TCP_FIN_WAIT1 ||
+ if (before == BPF_TCP_FIN_WAIT1 ||
# tc/judge.h COMPARED
any reset closes
- if (n->sequence != peer->ack && !sent)
+ if (false)
the window is not checked
- if (!(flags & TCP_ACK) || !fits) {
+ if (!(flags & TCP_ACK)) {
the client's ACK establishes
- original->state = STATE_UNPROVEN;
+ original->state = STATE_ESTABLISHED;
any segment of the backend is proof
- (n->next != own->next || n->ack != own->ack))
+ true)
any SYN-ACK answers
-  ||
- 	    !answers_syn(original, n, flags)) {
+ ) {
any device
- if (arrival == flow->arrival || arrives_by(skb, p, arrival, &s->hop))
+ if (true)
any tag
- if (own->tag && p->sctp.tag != own->tag)
+ if (false)
UDP is a stream when answered
- original->state = before == STATE_NEW ? STATE_ANSWERED : STATE_ESTABLISHED;
+ original->state = STATE_ESTABLISHED;
# tc/flow.h COMPARED
UDP is a stream from its third datagram on
- return elapsed(flow->seen.started, now) > STREAM_SECONDS * SECOND;
+ return true;
# tc/judge.h COMPARED
SCTP is established by the INIT ACK
- peer->tag = announced;
- 		original->state = STATE_ANSWERED;
+ peer->tag = announced;
+ 		original->state = STATE_ESTABLISHED;
""")
)

GOALS = {"c": 80, "conntrack": 100}
"""Group → how many of a hundred must be noticed."""


def patches(group: str) -> list[Patch]:
    return [patch for patch in PATCHES if (patch.tests == TESTS["COMPARED"]) == (group == "conntrack")]
