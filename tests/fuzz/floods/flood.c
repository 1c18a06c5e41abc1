/* SPDX-License-Identifier: Apache-2.0 */
/* Floods from forged addresses, honest datagrams from many clients, and servers that are fast
 * enough for both.
 *
 *   flood send KIND DEVICE GATEWAY_MAC ADDRESS PORT RATE SECONDS FIRST_PORT PORTS SEED WAIT MOST
 *   flood serve PORT SILENT_PORT     TCP and UDP echo on PORT, UDP that never answers; until killed
 *
 * `send` prints "SENT ANSWERS SECONDS": frames, and UDP datagrams from PORT that have come back.
 * RATE 0 is as fast as it goes. WAIT: seconds without an answer after which no more are awaited, a
 * tenth of that for the first one. MOST: datagrams without an answer after which no more are sent
 * until one comes; 0: any number. KIND:
 *
 *   syn, syn6    from any address; syn6 from one /64
 *   syns         three SYNs of each client with different numbers, of which the backend sees the
 *                second one: the checksums of the others are wrong
 *   ack          SYNs from any address, and 1,000 frames later an ACK of the same client with a
 *                wrong checksum
 *   udp          a datagram of a new client each time
 *   stream       the same, and a second one of each client 2.5 s later
 *   rst, icmp    resets, and ICMP errors, for connections of 198.51.100.7 with PORTS ports from
 *                FIRST_PORT; any sequence number
 *   fragment     first fragments of datagrams, of a new client each time
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <netpacket/packet.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define BATCH 32
#define FRAME 128
#define LATER 1000 /* frames between a SYN and its ACK */
#define STREAM 2.5 /* seconds between the two datagrams of a stream's client */
#define STREAMS (1 << 20)
#define EVENTS 256

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

/* ---- sending ------------------------------------------------------------------------------- */

static uint64_t seed = 88172645463325252ULL;

static uint32_t chance(void)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return seed >> 16;
}

static struct {
	char kind[16];
	unsigned char ethernet[14];
	unsigned char to[16];
	int v6;
	uint16_t port, first, ports;
} how;

static uint32_t add(uint32_t sum, const unsigned char *p, int n)
{
	for (; n > 1; n -= 2, p += 2)
		sum += p[0] << 8 | p[1];
	return n ? sum + (p[0] << 8) : sum;
}

static uint16_t folded(uint32_t sum)
{
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

static void put16(unsigned char *p, uint16_t v)
{
	p[0] = v >> 8;
	p[1] = v;
}

static void put32(unsigned char *p, uint32_t v)
{
	put16(p, v >> 16);
	put16(p + 2, v);
}

/* The IPv4 header before `length` bytes. */
static void ipv4(unsigned char *p, uint32_t from, const unsigned char *to, int protocol, int length,
		 uint16_t fragment)
{
	memset(p, 0, 20);
	p[0] = 0x45;
	put16(p + 2, 20 + length);
	put16(p + 4, chance());
	put16(p + 6, fragment);
	p[8] = 64;
	p[9] = protocol;
	put32(p + 12, from);
	memcpy(p + 16, to, 4);
	put16(p + 10, folded(add(0, p, 20)));
}

static void segment(unsigned char *p, uint16_t from, uint16_t to, uint32_t number, int flags)
{
	memset(p, 0, 20);
	put16(p, from);
	put16(p + 2, to);
	put32(p + 4, number);
	put32(p + 8, flags & 0x10 ? chance() : 0);
	p[12] = 5 << 4;
	p[13] = flags;
	put16(p + 14, 64240);
}

static int tcp4(unsigned char *ip, uint32_t from, uint16_t port, uint32_t number, int flags, int bad)
{
	unsigned char *tcp = ip + 20;

	ipv4(ip, from, how.to, IPPROTO_TCP, 20, 0x4000);
	segment(tcp, port, how.port, number, flags);
	put16(tcp + 16, folded(add(add(IPPROTO_TCP + 20, ip + 12, 8), tcp, 20)) ^ (bad ? 0x55 : 0));
	return 40;
}

static int syn6(unsigned char *ip)
{
	static const unsigned char net[8] = {0x20, 0x01, 0x0d, 0xb8, 0, 0x66, 0, 1};
	unsigned char *tcp = ip + 40;

	memset(ip, 0, 40);
	ip[0] = 0x60;
	put16(ip + 4, 20);
	ip[6] = IPPROTO_TCP;
	ip[7] = 64;
	memcpy(ip + 8, net, 8);
	put32(ip + 16, chance());
	put32(ip + 20, chance());
	memcpy(ip + 24, how.to, 16);
	segment(tcp, 1024 + chance() % 60000, how.port, chance(), 2);
	put16(tcp + 16, folded(add(add(IPPROTO_TCP + 20, ip + 8, 32), tcp, 20)));
	return 60;
}

static int udp4(unsigned char *ip, uint32_t from, uint16_t port, int fragment)
{
	unsigned char *udp = ip + 20;

	ipv4(ip, from, how.to, IPPROTO_UDP, 16, fragment ? 0x2000 : 0);
	put16(udp, port);
	put16(udp + 2, how.port);
	put16(udp + 4, fragment ? 1000 : 16);
	memcpy(udp + 8, "question", 8);
	put16(udp + 6, 0); /* none */
	return 36;
}

/* An ICMP port unreachable error about a segment from the Service to the client. */
static int icmp4(unsigned char *ip, uint32_t from, uint32_t client, uint16_t port)
{
	static const unsigned char zero[4];
	unsigned char *icmp = ip + 20, *quote = icmp + 8, raw[4];

	put32(raw, client);
	ipv4(quote, 0, raw, IPPROTO_TCP, 20, 0x4000);
	memcpy(quote + 12, how.to, 4);
	put16(quote + 10, 0);
	put16(quote + 10, folded(add(0, quote, 20)));
	segment(quote + 20, how.port, port, chance(), 0x10);
	icmp[0] = icmp[1] = 3;
	memcpy(icmp + 2, zero, 2);
	memcpy(icmp + 4, zero, 4);
	put16(icmp + 2, folded(add(0, icmp, 48)));
	ipv4(ip, from, how.to, IPPROTO_ICMP, 48, 0);
	return 68;
}

/* The second datagram of a client whose first one was sent STREAM ago, or a new client's first. */
static int stream(unsigned char *ip, uint32_t from, uint16_t port)
{
	static struct {
		double at;
		uint32_t from;
		uint16_t port;
	} begun[STREAMS];
	static uint64_t first, last;
	double t = now();

	if (first != last && t >= begun[first % STREAMS].at + STREAM) {
		from = begun[first % STREAMS].from;
		port = begun[first++ % STREAMS].port;
	} else if (last - first < STREAMS) {
		begun[last % STREAMS].at = t;
		begun[last % STREAMS].from = from;
		begun[last++ % STREAMS].port = port;
	}
	return udp4(ip, from, port, 0);
}

/* The next frame, without its link header. */
static int next(unsigned char *ip, uint64_t number)
{
	static struct {
		uint32_t from, number;
		uint16_t port;
	} begun[LATER];
	uint32_t from = 0x64400000 | (chance() & 0x3fffff), victim = 0xc6336407; /* 100.64.0.0/10 */
	uint16_t port = 1024 + chance() % 60000, known = how.first + chance() % (how.ports ?: 1);
	int slot = number / 2 % LATER, length;

	if (how.v6)
		return syn6(ip);
	if (!strcmp(how.kind, "ack")) {
		if (number % 2 && begun[slot].port) {
			length = tcp4(ip, begun[slot].from, begun[slot].port, begun[slot].number + 1,
				      0x10, 1);
			begun[slot].port = 0;
			return length;
		}
		slot = (slot + LATER - 1) % LATER;
		begun[slot].from = from;
		begun[slot].port = port;
		begun[slot].number = chance();
		return tcp4(ip, from, port, begun[slot].number, 2, 0);
	}
	if (!strcmp(how.kind, "syns")) {
		static struct {
			uint32_t from;
			uint16_t port;
		} same;

		if (number % 3 == 0) {
			same.from = from;
			same.port = port;
		}
		return tcp4(ip, same.from, same.port, chance(), 2, number % 3 != 1);
	}
	if (!strcmp(how.kind, "udp"))
		return udp4(ip, from, port, 0);
	if (!strcmp(how.kind, "stream"))
		return stream(ip, from, port);
	if (!strcmp(how.kind, "fragment"))
		return udp4(ip, from, port, 1);
	if (!strcmp(how.kind, "rst"))
		return tcp4(ip, victim, known, chance(), 4, 0);
	if (!strcmp(how.kind, "icmp"))
		return icmp4(ip, from, victim, known);
	return tcp4(ip, from, port, chance(), 2, 0);
}

/* Counts the received datagrams that come from the Service to forged clients, 100.64.0.0/10. */
static long answers(int fd)
{
	unsigned char raw[128];
	long count = 0;

	while (recv(fd, raw, sizeof(raw), MSG_DONTWAIT) > 0)
		count += raw[12] == 8 && raw[23] == IPPROTO_UDP &&
			 (raw[34] << 8 | raw[35]) == how.port && raw[30] == 100 &&
			 raw[31] >> 6 == 1;
	return count;
}

static int send_all(const char *device, double rate, double seconds, double wait, uint64_t most)
{
	static unsigned char frames[BATCH][FRAME];
	static struct iovec parts[BATCH];
	static struct mmsghdr messages[BATCH];
	struct sockaddr_ll at = {.sll_family = AF_PACKET, .sll_protocol = htons(3)};
	int fd = socket(AF_PACKET, SOCK_RAW, 0), one = 1, room = 64 << 20;
	double begin, end, heard, t;
	uint64_t sent = 0;
	long back = 0;

	at.sll_ifindex = if_nametoindex(device);
	setsockopt(fd, SOL_PACKET, PACKET_QDISC_BYPASS, &one, sizeof(one));
	setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof(one));
	setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room));
	if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof(at)))
		return perror("packet socket"), 1;
	begin = now();
	end = begin + seconds;
	/* A stalled machine sends later, not less. */
	while ((t = now()) < end || (sent < rate * seconds / 2 && t < end + 60)) {
		if (rate && (sent > (t - begin) * rate || (most && sent - back > most))) {
			struct timespec nap = {0, 500000};

			back += answers(fd);
			nanosleep(&nap, NULL);
			continue;
		}
		for (int i = 0; i < BATCH; i++) {
			memcpy(frames[i], how.ethernet, 14);
			parts[i].iov_base = frames[i];
			parts[i].iov_len = 14 + next(frames[i] + 14, sent + i);
			messages[i].msg_hdr.msg_iov = &parts[i];
			messages[i].msg_hdr.msg_iovlen = 1;
		}
		for (int done = 0; done < BATCH;) {
			int n = sendmmsg(fd, messages + done, BATCH - done, 0);

			if (n < 0 && errno != ENOBUFS && errno != EAGAIN)
				return perror("sendmmsg"), 1;
			done += n > 0 ? n : 1; /* the device had no room: lost, as on a wire */
		}
		sent += BATCH;
		back += answers(fd);
	}
	t = heard = now();
	/* The server may be stalled: answers have ended once none has come for a while. */
	while (rate && back < (long)sent && now() < heard + (back ? wait : wait / 10)) {
		long more = answers(fd);

		back += more;
		if (more)
			heard = now();
	}
	printf("%llu %ld %.3f\n", (unsigned long long)sent, back, t - begin);
	return 0;
}

/* ---- servers ------------------------------------------------------------------------------- */

static int bound(int kind, uint16_t port)
{
	struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
	int fd = socket(AF_INET6, kind | SOCK_NONBLOCK, 0), one = 1, room = 64 << 20;

	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room));
	/* replies come from the address that the client has sent to */
	setsockopt(fd, IPPROTO_IPV6, IPV6_RECVPKTINFO, &one, sizeof(one));
	if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof(at)) ||
	    (kind == SOCK_STREAM && listen(fd, 4096))) {
		perror("cannot serve");
		exit(1);
	}
	return fd;
}

static void echo_datagrams(int fd)
{
	static char raw[BATCH][256], control[BATCH][128];
	static struct sockaddr_in6 peers[BATCH];
	static struct iovec parts[BATCH];
	static struct mmsghdr messages[BATCH];
	int n;

	do {
		for (int i = 0; i < BATCH; i++) {
			parts[i] = (struct iovec){raw[i], sizeof(raw[i])};
			messages[i].msg_hdr = (struct msghdr){
				.msg_name = &peers[i],
				.msg_namelen = sizeof(peers[i]),
				.msg_iov = &parts[i],
				.msg_iovlen = 1,
				.msg_control = control[i],
				.msg_controllen = sizeof(control[i]),
			};
		}
		n = recvmmsg(fd, messages, BATCH, MSG_DONTWAIT, NULL);
		for (int i = 0; i < n; i++) {
			parts[i].iov_len = messages[i].msg_len;
			sendmsg(fd, &messages[i].msg_hdr, MSG_DONTWAIT);
		}
	} while (n == BATCH);
}

static void serve_tcp(int tcp)
{
	int all = epoll_create1(0);
	struct epoll_event events[EVENTS], e = {.events = EPOLLIN};
	char raw[4096];

	e.data.fd = tcp;
	epoll_ctl(all, EPOLL_CTL_ADD, tcp, &e);
	for (;;) {
		int n = epoll_wait(all, events, EVENTS, -1);

		for (int i = 0; i < n; i++) {
			int fd = events[i].data.fd;
			ssize_t got;

			if (fd == tcp) {
				while ((e.data.fd = accept4(tcp, NULL, NULL, SOCK_NONBLOCK)) >= 0)
					epoll_ctl(all, EPOLL_CTL_ADD, e.data.fd, &e);
			} else if ((got = read(fd, raw, sizeof(raw))) > 0) {
				if (write(fd, raw, got) != got)
					close(fd);
			} else if (got == 0 || errno != EAGAIN) {
				close(fd);
			}
		}
	}
}

/* UDP and TCP in separate processes, so that a flood of datagrams does not delay TCP. */
static void serve(uint16_t port, uint16_t silent)
{
	int tcp = bound(SOCK_STREAM, port), udp = bound(SOCK_DGRAM, port);
	struct pollfd wait = {.fd = udp, .events = POLLIN};
	pid_t parent = getpid();

	bound(SOCK_DGRAM, silent);
	if (!fork()) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() == parent)
			serve_tcp(tcp);
		exit(1);
	}
	puts("ready");
	fflush(stdout);
	for (;;) {
		poll(&wait, 1, -1);
		echo_datagrams(udp);
	}
}

int main(int argc, char **argv)
{
	unsigned char *m = how.ethernet;

	if (argc == 4 && !strcmp(argv[1], "serve"))
		serve(atoi(argv[2]), atoi(argv[3]));
	if (argc != 14 || strcmp(argv[1], "send"))
		return fputs("see flood.c\n", stderr), 2;
	snprintf(how.kind, sizeof(how.kind), "%s", argv[2]);
	sscanf(argv[4], "%hhx:%hhx:%hhx:%hhx:%hhx:%hhx", m, m + 1, m + 2, m + 3, m + 4, m + 5);
	m[6] = 2;
	how.v6 = strchr(argv[5], ':') != NULL;
	put16(m + 12, how.v6 ? 0x86dd : 0x0800);
	inet_pton(how.v6 ? AF_INET6 : AF_INET, argv[5], how.to);
	how.port = atoi(argv[6]);
	how.first = atoi(argv[9]);
	how.ports = atoi(argv[10]);
	seed ^= strtoull(argv[11], NULL, 10) * 0x9e3779b97f4a7c15ULL;
	seed = seed ?: 1; /* the one state that the generator never leaves */
	return send_all(argv[3], atof(argv[7]), atof(argv[8]), atof(argv[12]), atol(argv[13]));
}
